"""What an iteration and an evaluation log."""

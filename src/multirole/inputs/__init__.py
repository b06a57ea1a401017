"""What the trainer is given, checked before anything is computed: arguments, datasets, reward functions."""

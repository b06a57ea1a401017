"""What runs outside the trainer: imports only the standard library, and nothing of the rest of the package."""

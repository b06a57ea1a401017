"""From the rows of one iteration to the gradient of each optimizer step, adapter by adapter."""

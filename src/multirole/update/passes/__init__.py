"""The inside of a forward and backward pass. `core.model_passes` uses it; without it a pass gives the same log-probs and gradients, slower.

Nothing here knows episodes, advantages or the loss.
"""

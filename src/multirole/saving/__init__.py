"""Checkpoints and model cards of several adapters."""

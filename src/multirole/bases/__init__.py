"""Base models that are given as GGUF files."""

"""Workflows and tools that are made of environments of other packages, an adapter each. None is needed by the library."""

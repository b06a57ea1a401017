"""Old names of modules."""

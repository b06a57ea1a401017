"""Episodes on an engine: the workflows of one iteration run together, and every model call is recorded as a turn."""

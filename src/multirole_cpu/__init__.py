"""An engine and faster passes for small models on CPUs."""

"""Code that runs inside the sandbox processes. It imports only the standard library."""

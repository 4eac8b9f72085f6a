"""Complete programs to start from."""

"""What differs between the values of parallel.mode: sync, local and server."""

"""The values of parallel.mode: sync, local and server."""

"""Strategies for the values of parallel.mode: sync, local and server."""

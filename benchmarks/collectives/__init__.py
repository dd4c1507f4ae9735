"""Collectives beside the MPI library's own, gloo and memcpy."""

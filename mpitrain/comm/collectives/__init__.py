"""Collective operations: their arguments, their algorithms, and the binding of programs to memory."""

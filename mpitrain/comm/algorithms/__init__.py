"""Collective algorithms: each a function that returns a Program (see mpitrain.comm.programs.program)."""

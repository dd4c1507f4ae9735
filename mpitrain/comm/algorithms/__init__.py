"""Collective algorithms: functions that return a `Program` (see `mpitrain.comm.programs.program`)."""

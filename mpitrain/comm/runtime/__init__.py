"""Execution of programs: compiling, binding, running, comparing between ranks, waiting and watching."""

"""Collective algorithms as data: what they are, proved, counted and simulated without MPI."""

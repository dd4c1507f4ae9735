"""Collective algorithms as data: their specification, proof, cost and simulation without MPI."""

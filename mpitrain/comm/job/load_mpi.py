"""Starts MPI, with the settings it needs. Imported by `mpi`, before mpi4py."""

# ruff: noqa: E402  MPI reads its settings once, as it starts: they come first

from __future__ import annotations

import os

from mpitrain.comm.job import fault_tolerance, single_copy

single_copy.prepare()
# Open MPI's UCX component complains at every shared window it could not serve anyway; a setting of the user's wins.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# With fault tolerance: coll/han waits in communicators of its own, which are not revoked with the one they serve.
if fault_tolerance.switched_on():
    os.environ.setdefault("OMPI_MCA_coll", "^han")

from mpitrain.comm.job import presence

presence.load()

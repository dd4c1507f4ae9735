"""Whether MPI goes on without processes that die: User-Level Failure Mitigation, ULFM. The one place that says so."""

from __future__ import annotations

import os

_SETTING = "OMPI_MCA_mpi_ft_enable"  # what mpirun --with-ft ulfm sets
_ENABLED = ("1", "t", "true", "y", "yes", "enabled")  # values of a logical setting of Open MPI


def switched_on() -> bool:
    """Whether it was asked for when the job was started. Known before MPI is."""
    return os.environ.get(_SETTING, "").strip().lower() in _ENABLED


def missing() -> str:
    """What there has to be for it; empty where it is on."""
    from mpi4py import MPI

    from mpitrain.comm.process.topology import library_name

    name, version = MPI.get_vendor()
    if name != "Open MPI" or version < (5, 0):
        return f"an MPI with fault tolerance (ULFM): Open MPI 5 or later; this is {library_name()}"
    if not switched_on():
        return "fault tolerance to be switched on: start the job with mpirun --with-ft ulfm"
    return ""

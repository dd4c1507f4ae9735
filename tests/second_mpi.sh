#!/usr/bin/env bash
# Creates .venv-MPI, an environment with another MPI that borrows everything else from .venv.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv-$1
if [ ! -e "$venv/mpitrain-installed" ]; then
    "$root/.venv/bin/python" -m venv --without-pip "$venv"
    "$root/.venv/bin/python" -m pip --python "$venv/bin/python" install -q --disable-pip-version-check \
        -c "$root/constraints.txt" "$1"
    site=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    borrowed=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$site')" >"$borrowed/borrowed.pth"
    touch "$venv/mpitrain-installed"
fi

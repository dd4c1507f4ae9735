#!/usr/bin/env bash
# Installs from Debian what the tests of clusters need (Slurm and munge, `ip` and `tc`, h5dump, a C compiler for a slow
# link where the kernel has no netem), a C++ compiler for the simulated accelerator, and a browser for the report's page. Does nothing where it is there already; without root or apt-get it says so and those tests skip.
set -uo pipefail
packages=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null || packages+=(slurm-wlm)
command -v munged >/dev/null || packages+=(munge)
command -v ip >/dev/null && command -v tc >/dev/null || packages+=(iproute2)
command -v h5dump >/dev/null || packages+=(hdf5-tools)
command -v "${CC:-cc}" >/dev/null || packages+=(gcc libc6-dev)
command -v "${CXX:-g++}" >/dev/null || packages+=(g++)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || packages+=(chromium fonts-dejavu-core)
[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${packages[*]}; installing them needs root and apt-get: tests that need them will skip" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >/dev/null ||
    echo "installing ${packages[*]} failed: tests that need them will skip" >&2
exit 0

#!/usr/bin/env bash
# A remote shell for mpirun (plm_ssh_agent): enter_host.sh [OPTIONS] ADDRESS COMMAND...
# The host with address 10.77.0.N is the network namespace ${MPITRAIN_HOSTS}hN; the command runs there, on a machine
# that calls itself hN, after $MPITRAIN_MOUNT if there is one. See namespace_hosts.py.
while [[ ${1:-} == -* ]]; do shift; done
name=h${1##*.}
shift
exec ip netns exec "$MPITRAIN_HOSTS$name" unshare --uts bash -c "hostname $name; ${MPITRAIN_MOUNT:-} $*"

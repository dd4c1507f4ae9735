"""A torch.distributed backend over MPI, for PyTorch as its wheels are.

    import mpitrain.backend
    torch.distributed.init_process_group("mpitrain")

under mpirun or srun; no MASTER_ADDR, no port. RANK, WORLD_SIZE and LOCAL_RANK are set for scripts that read them.
A script written for torchrun runs as it is: `mpirun -n 4 python -m mpitrain.backend script.py arguments...`.

Needs `mpitrain.comm` alone. Importing it does not start MPI where the launcher's environment tells the rank, so
that data workers, which import what the script imports, stay outside.
"""

from mpitrain.backend.registration import NAME, register

__all__ = ["NAME"]

register()

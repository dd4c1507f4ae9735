"""A torch.distributed backend over MPI that works with the official PyTorch wheels.

    import mpitrain.backend
    torch.distributed.init_process_group("mpitrain")

Start the script with mpirun or srun; MASTER_ADDR and a port are not needed. RANK, WORLD_SIZE and LOCAL_RANK are set for
scripts that read them. A script written for torchrun runs unchanged:
`mpirun -n 4 python -m mpitrain.backend script.py arguments...`.

This package depends on `mpitrain.comm` alone. Importing it does not start MPI if the launcher's environment contains
the rank. Thus data-loader workers, which repeat the script's imports, do not start MPI.
"""

from mpitrain.backend.registration import NAME, register

__all__ = ["NAME"]

register()

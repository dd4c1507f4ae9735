"""Horovod's interface for PyTorch on mpitrain's communication: `import mpitrain.horovod.torch as hvd`.

The names, arguments and results are Horovod's (https://horovod.readthedocs.io), the ranks those of mpirun or srun.
docs/horovod.md lists what differs.
"""

from mpitrain.horovod.torch import elastic
from mpitrain.horovod.torch.batch_norm import HorovodBatchNorm as SyncBatchNorm
from mpitrain.horovod.torch.compression import Compressions as Compression
from mpitrain.horovod.torch.handles import barrier, join, poll, synchronize
from mpitrain.horovod.torch.moving import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from mpitrain.horovod.torch.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpitrain.horovod.torch.optimizer import DistributedOptimizer
from mpitrain.horovod.torch.reducing import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from mpitrain.horovod.torch.scattering import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from mpitrain.horovod.torch.session import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from mpitrain.horovod.torch.submission import HorovodInternalError, ReduceOp

Average, Sum, Adasum, Min, Max, Product = ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
]
__all__ += ["Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier"]
__all__ += ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object"]
__all__ += ["broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built"]
__all__ += ["ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather"]
__all__ += ["grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"]
__all__ += [
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
]
__all__ += ["is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported"]
__all__ += ["nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built"]
__all__ += ["shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize"]

"""Registration of the backend "mpitrain" with torch.distributed: creating its groups, and rendezvous.

Ranks need no address, because MPI has connected them. torch requires a store; ours raises an error at each use.
Scripts that read these variables find them as torchrun would set them, taken from MPI or its launcher:

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | number of this process, and number of processes |
| LOCAL_RANK, LOCAL_WORLD_SIZE | number of this process on its node, and number of processes there |
| GROUP_RANK, GROUP_WORLD_SIZE | number of this process's node, and number of nodes |

Some functions of torch.distributed treat gloo or NCCL specially. Ours replace them, and call the originals for other
groups:

| function | behaviour for our groups |
|---|---|
| init_process_group | needs no address even if MASTER_ADDR is set |
| monitored_barrier | is supported |
| split_group | needs no accelerator |
| _store_based_barrier | does nothing: making a group is collective, and it has no store |
| _new_process_group_helper | makes sub-groups of our groups ours, whichever backend is requested, because others need |
| | the store; under `python -m mpitrain.backend` every group is ours |
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler, rendezvous

from mpitrain.backend.base import ArgumentError, Base, NoStore
from mpitrain.early import report_errors
from mpitrain.errors import InputError

if TYPE_CHECKING:
    from mpitrain.backend.process_group import MPIProcessGroup
    from mpitrain.comm import Communicator

NAME = "mpitrain"
ADDRESS = "mpitrain://"  # init_method
_MIN_TIMEOUT = 10.0  # seconds; shorter timeouts, meant for a short wait, must not end the whole job
_HELPER = "_new_process_group_helper"
_SIMULATED = {"fake", "threaded"}  # backends that do not communicate


def register_devices() -> None:
    """Tell torch that the backend accepts tensors on the CPU and on the accelerator, if there is one.

    Called whenever a group is made, because a package imported in between may register an accelerator.
    """
    kinds = dist.Backend.backend_capability[NAME]
    accelerator = torch.accelerator.current_accelerator()  # without mpitrain.comm, which would start MPI
    for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        install_functional(kind)
        if kind not in kinds:
            kinds.append(kind)
            dist.Backend.default_device_backend_map.setdefault(kind, NAME)


def use_for_all_groups() -> None:
    """Make every new process group one of ours, whichever backend and address the script requests."""
    _replace(_HELPER, functools.partial(_new_group, True))
    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = lambda url, **kwargs: rendezvous(_mpi_address(url))


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed.

    Args:
        name: Name of the function.
        ours: Replacement. It is called with the original function, followed by the arguments as keywords.
    """
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, **signature.bind(*args, **kwargs).arguments)

    for module in (c10d, dist):
        if hasattr(module, name):
            setattr(module, name, function)


def _init_process_group(original: Callable[..., None], **arguments: Any) -> None:
    register_devices()
    from_environment = (arguments.get("init_method") or "env://").startswith("env://")
    if NAME in str(arguments.get("backend")) and from_environment and arguments.get("store") is None:
        arguments["init_method"] = ADDRESS
    original(**arguments)


def _rendezvous_by_environment(original: Callable[..., Any], url: str, **kwargs: Any) -> Iterator[Any]:
    """Serve init_method env://: by MPI if MASTER_ADDR is not set, else by torch's own function, for other backends."""
    if os.environ.get("MASTER_ADDR"):
        yield from original(url, **kwargs)
    else:
        yield from rendezvous(_mpi_address(url))


def _mpi_address(url: str) -> str:
    """Return our address, with the rank and world size from the query of another address."""
    return f"{ADDRESS}?{url.partition('?')[2]}"


def _is_ours(group: Any) -> bool:
    """Return True if the group is ours; for None, if the default group is."""
    return isinstance(c10d.GroupMember.WORLD if group is None else group, Base)


def _monitored_barrier(original: Callable[..., None], **arguments: Any) -> None:
    group, timeout = arguments.get("group"), arguments.get("timeout")
    if not _is_ours(group):
        return original(**arguments)
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    ours: Any = group or c10d._get_default_group()
    return ours.monitored_barrier(timeout, arguments.get("wait_all_ranks", False))


def _store_based_barrier(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not _is_ours(None):
        original(*args, **kwargs)


def _new_group(always: bool, original: Callable[..., Any], **arguments: Any) -> Any:
    backend, size = str(arguments["backend"]), arguments["group_size"]
    inner = getattr(arguments["store"], "underlying_store", None)
    if backend not in _SIMULATED and (always or _is_ours(None)):
        arguments["backend"] = dist.Backend(NAME)
    elif NAME not in backend and size > 1 and isinstance(inner, NoStore):
        raise ValueError(
            f'backend "{backend}" needs an address at which ranks meet; set MASTER_ADDR and MASTER_PORT, call '
            f'init_process_group("{NAME}"), or start the script with python -m mpitrain.backend'
        )
    if size == -1:  # as for torch's own MPI backend
        arguments["store"], arguments["group_rank"], arguments["group_size"] = next(rendezvous(ADDRESS))
    return original(**arguments)


def _split_group(original: Callable[..., Any], **arguments: Any) -> Any:
    """Return the new group that contains this rank; None if no list of `split_ranks` does.

    Only the members of each list take part in making its group.
    """
    if not _is_ours(arguments.get("parent_pg")):
        return original(**arguments)
    split_ranks = arguments.get("split_ranks")
    if not split_ranks:
        raise ValueError("split_group: split_ranks is empty; pass a list of ranks for each group")
    parent = arguments.get("parent_pg") or c10d._get_default_group()
    rank = c10d.get_rank(parent)
    mine = next((sorted(ranks) for ranks in split_ranks if rank in ranks), None)
    if mine is None:
        return None
    ranks = [c10d.get_global_rank(parent, r) for r in mine]
    timeout, described = arguments.get("timeout"), arguments.get("group_desc")
    return c10d.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=described)


@functools.cache
def install_functional(kind: str) -> torch.library.Library:
    """Register the functional collectives that torch's C++ code would run without calling a group written in Python.

    The registration lasts as long as the returned library, which the cache keeps for ever.

    Args:
        kind: Kind of device of the tensors.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    key: str = torch._C._dispatch_key_for_device(kind)
    library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, key)
    return library


def _all_gather_into_tensor_out(input: torch.Tensor, group_size: int, group_name: Any, *, out: Any) -> torch.Tensor:
    """Gather into `out`. torch.compile merges the all-gathers of a bucket into this operation."""
    functions: Any = c10d  # its argument types differ between releases
    group = functions._resolve_process_group(group_name) if isinstance(group_name, str) else group_name
    if not isinstance(group, dist.ProcessGroup):
        group = functions.ProcessGroup.unbox(group)
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    torch._C._distributed_c10d._register_work(out, group._allgather_base(out, input, options))
    return out


# names that launchers use for rank, size and local rank
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def set_environment(world: Communicator) -> None:
    """Set RANK, WORLD_SIZE and the other variables of the table at the top of this module from MPI."""
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node,
        "GROUP_WORLD_SIZE": world.num_nodes,
    }
    os.environ.update({name: str(value) for name, value in values.items()})


def set_environment_early() -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK before the script reads them, without starting MPI if the launcher sets them.

    Raises:
        InputError: The script was started by torchrun or accelerate launch, whose processes are not ranks of MPI, or by
            a launcher whose processes do not see each other.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        report_errors(lambda error: (str(error) if first else "") if isinstance(error, InputError) else None)
        raise InputError(
            "torchrun (or accelerate launch, which calls it) starts processes that are not MPI ranks; start the script "
            f"with mpirun or srun instead: mpirun -n N python -m mpitrain.backend {os.path.basename(sys.argv[0])}"
        )
    for names in _LAUNCHERS:
        if all(os.environ.get(name, "").isdigit() for name in names):
            for variable, name in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), names, strict=True):
                os.environ[variable] = os.environ[name]
            return
    # `python -m mpitrain.backend` reads its arguments first and then starts MPI itself
    if multiprocessing.parent_process() is None and ("-m", "mpitrain.backend") not in pairwise(sys.orig_argv):
        from mpitrain.comm import init

        set_environment(init(abort_on_error=False))


def register() -> None:
    """Register the backend with torch.distributed and replace torch's functions. May be called twice."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    register_rendezvous_handler(NAME, rendezvous_by_mpi)
    _replace("init_process_group", _init_process_group)
    _replace("monitored_barrier", _monitored_barrier)
    _replace("split_group", _split_group)
    c10d._store_based_barrier = functools.partial(_store_based_barrier, c10d._store_based_barrier)
    _replace(_HELPER, functools.partial(_new_group, False))
    _rendezvous_handlers["env"] = functools.partial(_rendezvous_by_environment, _rendezvous_handlers["env"])
    register_devices()
    set_environment_early()


def rendezvous_by_mpi(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield store, rank and world size for a rendezvous; the numbers are MPI's.

    Args:
        url: Address of the rendezvous. Its query may contain rank and world_size, which must agree with MPI.

    Raises:
        ArgumentError: The rank or world size of the caller differs from MPI's.
    """
    from mpitrain.backend.process_group import get_registry

    control = get_registry().control
    query = {name: int(value) for name, value in parse_qsl(urlsplit(url).query) if name in ("rank", "world_size")}
    for name, number in (("rank", control.rank), ("world_size", control.size)):
        if query.get(name, -1) not in (-1, number):
            control.process.faults.install()  # this rank may be the only one
            raise ArgumentError(
                f"init_process_group got {name} {query[name]}, but in MPI it is {number}; omit rank and world_size, or "
                "start the script with the number of ranks that it expects"
            )
    set_environment(control)
    yield get_registry().store, control.rank, control.size


def create(options: Any, _: Any = None) -> MPIProcessGroup:
    """Return a process group, as torch's registry of backends requests it. Collective over its ranks.

    The timeout of the default group also becomes the time after which an unfinished collective ends the job.

    Args:
        options: torch's options of the group; their list of global ranks is empty for a group of all ranks.

    Raises:
        InputError: The ranks or the size disagree with MPI.
    """
    from mpitrain.backend.process_group import MPIProcessGroup, get_registry

    here = get_registry()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if options.group_size > here.control.size:
        raise InputError(
            f"the process group has {options.group_size} ranks, but MPI has only {here.control.size}; start the "
            "script with mpirun or srun, and omit rank and world_size"
        )
    if ranks[options.group_rank] != here.control.rank:
        raise InputError(
            f"init_process_group got rank {ranks[options.group_rank]}, but in MPI it is {here.control.rank}; omit rank "
            "and world_size"
        )
    if not c10d.is_initialized():
        from mpitrain.comm import set_timeout

        here.control.process.faults.install()  # an error on one rank ends the job, so that the others do not hang
        set_timeout(max(options.timeout.total_seconds(), _MIN_TIMEOUT))
    return MPIProcessGroup(here.acquire(ranks), options.group_id, options.store, options.timeout)

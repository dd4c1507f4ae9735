"""Functions of torch.distributed that we put ours before, because they ask for gloo or NCCL by name.

| function | for our groups |
|---|---|
| init_process_group | needs no address even where MASTER_ADDR is set |
| monitored_barrier | is not refused |
| split_group | needs no accelerator |
| _store_based_barrier | does nothing: making a group is collective, and it has no store |
| _new_process_group_helper | sub-groups of ours are ours, whatever name they are asked for by: others would need |
| | the store; under `python -m mpitrain.backend` every group is |
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers, rendezvous

from mpitrain.backend.failures import NoStore
from mpitrain.backend.versions import Base

_HELPER = "_new_process_group_helper"
_SIMULATED = {"fake", "threaded"}  # backends that do not communicate


def install(name: str, address: str) -> None:
    """Put our functions before torch's.

    Args:
        name: Our backend's name.
        address: The init_method that asks MPI.
    """
    _replace("init_process_group", functools.partial(_init_process_group, name, address))
    _replace("monitored_barrier", _monitored_barrier)
    _replace("split_group", _split_group)
    c10d._store_based_barrier = functools.partial(_store_based_barrier, c10d._store_based_barrier)
    _replace(_HELPER, functools.partial(_new_group, name, False))
    _rendezvous_handlers["env"] = functools.partial(_meet_by_environment, _rendezvous_handlers["env"], address)


def know_devices(name: str) -> None:
    """Tell torch that the backend takes tensors of the CPU and of the accelerator there is.

    Each time that a group is made, because a package that is imported later may bring an accelerator along.

    Args:
        name: Our backend's name.
    """
    kinds = dist.Backend.backend_capability[name]
    found = torch.accelerator.current_accelerator()  # not by mpitrain.comm, which would start MPI
    for kind in ("cpu",) if found is None else ("cpu", found.type):
        install_functional(kind)
        if kind not in kinds:
            kinds.append(kind)
            dist.Backend.default_device_backend_map.setdefault(kind, name)


def take_over(name: str, address: str) -> None:
    """Let every process group be one of ours, whichever backend and address the script names.

    Args:
        name: Our backend's name.
        address: The init_method that asks MPI.
    """
    _replace(_HELPER, functools.partial(_new_group, name, True))
    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = lambda url, **kwargs: rendezvous(_asked(address, url))


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """ours: called with the original first, and then with the arguments by their names."""
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, **signature.bind(*args, **kwargs).arguments)

    for module in (c10d, dist):
        if hasattr(module, name):
            setattr(module, name, function)


def _init_process_group(name: str, address: str, original: Callable[..., None], **given: Any) -> None:
    know_devices(name)
    from_environment = (given.get("init_method") or "env://").startswith("env://")
    if name in str(given.get("backend")) and from_environment and given.get("store") is None:
        given["init_method"] = address
    original(**given)


def _meet_by_environment(original: Callable[..., Any], address: str, url: str, **kwargs: Any) -> Iterator[Any]:
    """env:// without an address: MPI knows. With one, what it always did, for other backends."""
    if os.environ.get("MASTER_ADDR"):
        yield from original(url, **kwargs)
    else:
        yield from rendezvous(_asked(address, url))


def _asked(address: str, url: str) -> str:
    """The address, with the rank and size that the caller gave with another one."""
    _, _, given = url.partition("?")
    return f"{address}?{given}"


def _ours(group: Any) -> bool:
    """Whether the group, or without one the default group, is ours."""
    return isinstance(c10d.GroupMember.WORLD if group is None else group, Base)


def _monitored_barrier(original: Callable[..., None], **given: Any) -> None:
    group, timeout = given.get("group"), given.get("timeout")
    if not _ours(group):
        return original(**given)
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    ours: Any = group or c10d._get_default_group()
    return ours.monitored_barrier(timeout, given.get("wait_all_ranks", False))


def _store_based_barrier(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not _ours(None):
        original(*args, **kwargs)


def _new_group(name: str, always: bool, original: Callable[..., Any], **given: Any) -> Any:
    wanted, size, inner = str(given["backend"]), given["group_size"], getattr(given["store"], "underlying_store", None)
    if wanted not in _SIMULATED and (always or _ours(None)):
        given["backend"] = dist.Backend(name)
    elif name not in wanted and size > 1 and isinstance(inner, NoStore):
        raise ValueError(
            f'the ranks have no address for backend "{wanted}"; say init_process_group("{name}"), set MASTER_ADDR and '
            "MASTER_PORT, or start the script with python -m mpitrain.backend"
        )
    if size == -1:  # as for torch's own MPI backend
        given["store"], given["group_rank"], given["group_size"] = next(rendezvous(f"{name}://"))
    return original(**given)


def _split_group(original: Callable[..., Any], **given: Any) -> Any:
    """The group of the list of parent's ranks that has this one, or None: made by the members of each list."""
    if not _ours(given.get("parent_pg")):
        return original(**given)
    split_ranks = given.get("split_ranks")
    if not split_ranks:
        raise ValueError("split_group: split_ranks is empty; give a list of ranks for each group")
    parent = given.get("parent_pg") or c10d._get_default_group()
    rank = c10d.get_rank(parent)
    mine = next((sorted(ranks) for ranks in split_ranks if rank in ranks), None)
    if mine is None:
        return None
    ranks = [c10d.get_global_rank(parent, r) for r in mine]
    timeout, described = given.get("timeout"), given.get("group_desc")
    return c10d.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=described)


@functools.cache
def install_functional(kind: str) -> torch.library.Library | None:
    """Give torch the functional collectives that it carries out in C++ by ways on which a group in Python is not asked.

    They are there as long as what is returned, which is for ever.

    Args:
        kind: Of the devices that their tensors lie on.

    Returns:
        None where torch has none of them.
    """
    if not hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    key: str = torch._C._dispatch_key_for_device(kind)
    library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, key)
    return library


def _all_gather_into_tensor_out(input: torch.Tensor, group_size: int, group_name: Any, *, out: Any) -> torch.Tensor:
    """Gather into `out`: the operation into which torch.compile merges the all-gathers of one bucket."""
    functions: Any = c10d  # whose types of arguments differ between releases
    group = functions._resolve_process_group(group_name) if isinstance(group_name, str) else group_name
    if not isinstance(group, dist.ProcessGroup):
        group = functions.ProcessGroup.unbox(group)
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    torch._C._distributed_c10d._register_work(out, group._allgather_base(out, input, options))
    return out

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
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers, rendezvous

from mpitrain.backend.store import NoStore
from mpitrain.backend.versions import Base

_SIMULATED = {"fake", "threaded"}  # backends that do not communicate


def install(name: str, address: str, library: object) -> None:
    """name: our backend's. address: the init_method that asks MPI. library: operations, to be kept."""
    _replace("init_process_group", functools.partial(_init_process_group, name, address, library))
    _replace("monitored_barrier", _monitored_barrier)
    _replace("split_group", _split_group)
    c10d._store_based_barrier = functools.partial(_store_based_barrier, c10d._store_based_barrier)
    _take_helper(name, always=False)
    _rendezvous_handlers["env"] = functools.partial(_meet_by_environment, _rendezvous_handlers["env"], address)


def take_over(name: str, address: str) -> None:
    """Let every process group be one of ours, whichever backend and address the script names."""
    _take_helper(name, always=True)
    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = lambda url, **kwargs: rendezvous(_asked(address, url))


def _take_helper(name: str, always: bool) -> None:
    c10d._new_process_group_helper = functools.partial(_new_group, name, always, c10d._new_process_group_helper)


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """ours: called with the original first."""
    original = getattr(c10d, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    for module in (c10d, dist):
        setattr(module, name, function)


def _init_process_group(
    name: str,
    address: str,
    _: object,
    original: Callable[..., None],
    backend: str | None = None,
    init_method: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    from_environment = init_method is None or init_method.startswith("env://")
    if backend is not None and name in str(backend) and from_environment and kwargs.get("store") is None:
        init_method = address
    original(backend, init_method, *args, **kwargs)


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


def _monitored_barrier(
    original: Callable[..., None],
    group: Any = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    if not _ours(group):
        return original(group, timeout, wait_all_ranks)
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    ours: Any = group or c10d._get_default_group()
    return ours.monitored_barrier(timeout, wait_all_ranks)


def _store_based_barrier(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not _ours(None):
        original(*args, **kwargs)


def _new_group(
    name: str,
    always: bool,
    original: Callable[..., Any],
    group_size: int,
    group_rank: int,
    global_ranks_in_group: list[int],
    backend: Any,
    store: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    wanted = str(backend)
    if wanted not in _SIMULATED and (always or _ours(None)):
        backend = dist.Backend(name)
    elif name not in wanted and group_size > 1 and isinstance(getattr(store, "underlying_store", None), NoStore):
        raise ValueError(
            f'the ranks have no address for backend "{wanted}"; say init_process_group("{name}"), set MASTER_ADDR and '
            "MASTER_PORT, or start the script with python -m mpitrain.backend"
        )
    if group_size == -1:  # as for torch's own MPI backend
        store, group_rank, group_size = next(rendezvous(f"{name}://"))
    return original(group_size, group_rank, global_ranks_in_group, backend, store, *args, **kwargs)


def _split_group(
    original: Callable[..., Any],
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The group of the list of parent's ranks that has this one, or None: made by the members of each list."""
    if not _ours(parent_pg):
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, *args, **kwargs)
    if not split_ranks:
        raise ValueError("split_group: split_ranks is empty; give a list of ranks for each group")
    parent = parent_pg or c10d._get_default_group()
    rank = c10d.get_rank(parent)
    mine = next((sorted(ranks) for ranks in split_ranks if rank in ranks), None)
    if mine is None:
        return None
    ranks = [c10d.get_global_rank(parent, r) for r in mine]
    return c10d.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=group_desc)

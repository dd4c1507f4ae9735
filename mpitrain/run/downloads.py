"""Files that a script or a library fetches: rank 0 does it first, and the other ranks then find them.

Libraries look for a file, fetch it if it is missing, and check it. Ranks that did so at once would see each other's
unfinished files. So these calls run on rank 0, and then on the others:

- data sets that are made with `download=True` (any class of `torch.utils.data.Dataset` with this parameter);
- pretrained weights and models of torch.hub, and so of torchvision.

The Hugging Face hub needs none of this: it locks what it fetches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.hub
from torch.utils.data import Dataset

from mpitrain.run.session import ScriptRun


def install(session: ScriptRun) -> None:
    """Let rank 0 be the first to fetch files, from now on.

    Args:
        session: Run of the script.
    """

    def prepare_class(cls: type, **kwargs: Any) -> None:
        super(Dataset, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
        create = vars(cls).get("__init__")
        if create is not None and "download" in inspect.signature(create).parameters:
            cls.__init__ = _in_turn_if_downloading(session, cls.__qualname__, create)  # type: ignore[misc]

    Dataset.__init_subclass__ = classmethod(prepare_class)  # type: ignore[assignment]
    for name in ("load", "load_state_dict_from_url"):
        setattr(torch.hub, name, _in_turn(session, name, getattr(torch.hub, name)))


def _in_turn(session: ScriptRun, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another on rank 0, and then on the other ranks. Collective.

    Args:
        session: Run of the script.
        name: Name for messages.
        function: Function that fetches files.
    """

    @functools.wraps(function)
    def on_rank_0_first(*args: Any, **kwargs: Any) -> Any:
        if session.alone or not session.is_main():
            return function(*args, **kwargs)
        value, failure = None, None
        for turn in (True, False):
            session.meet(f"{name} on {'rank 0' if turn else 'the other ranks'}")
            if (session.rank == 0) == turn:
                try:
                    with session.without_meetings():
                        value = function(*args, **kwargs)
                except BaseException as error:  # the others are waiting
                    failure = error
        if failure is not None:
            raise failure
        return value

    return on_rank_0_first


def _in_turn_if_downloading(session: ScriptRun, name: str, create: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` that runs on rank 0 first if its argument `download` is true."""
    signature, downloading = inspect.signature(create), _in_turn(session, f"{name}(download=True)", create)

    @functools.wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = signature.bind(self, *args, **kwargs)
            arguments.apply_defaults()
            is_downloading = bool(arguments.arguments["download"])
        except TypeError:  # the call says what is wrong
            is_downloading = False
        (downloading if is_downloading else create)(self, *args, **kwargs)

    return __init__

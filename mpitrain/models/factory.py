"""The user's own model: `model.factory = "package.module:function"`.

The function is called as function(description, **model.options) and returns a module with a method
`loss(output, y)`, or a pair (module, loss_function). It may list its blocks for a pipeline (`pipeline_blocks()`,
or be an nn.Sequential). Whatever goes wrong in code that is not ours ends in one line with its own message and
place; the original exception stays attached as the cause.

The errors are not `agreed`: a missing package or file may be one node's alone.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from mpitrain.errors import InputError
from mpitrain.models.task import DataDescription, Task


def build_from_factory(path: str, description: DataDescription, options: Mapping[str, Any]) -> Task:
    """Import, call, check. Raises InputError for everything the user can mend."""
    function = _find(path)
    try:
        made = function(description, **options)
    except (Exception, SystemExit) as error:
        raise InputError(f"model.factory {path} raised {_told(error)}; mend it or model.options") from error
    return _checked(path, made)


def _find(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise InputError(f"model.factory {path!r} names no function; write package.module:function", agreed=True)
    module = _import(path, module_name)
    function = getattr(module, name, None)
    if function is None:
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise InputError(
            f"model.factory {path}: {module.__file__ or module_name} has no function {name!r}; "
            + _suggestion(name, known, "define it there")
        )
    if not callable(function):
        raise InputError(f"model.factory {path}: {name} is {type(function).__name__}, not a function; name one")
    return function


def _import(path: str, module_name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, however the job was started
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # its own import may be what is missing: then that is the message
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise InputError(f"model.factory {path}: {module_name} needs {_told(error)}; install it") from error
        raise InputError(
            f"model.factory {path}: there is no module {error.name!r} in {here} or among the installed packages; "
            + _suggestion(error.name, _modules_beside(error.name), "start the job in its folder, or install it")
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(f"model.factory {path}: importing {module_name} raised {_told(error)}; mend it") from error


def _modules_beside(name: str) -> list[str]:
    """Full names of the modules in the package that should have held `name`, or of all top-level modules."""
    parent, dot, _ = name.rpartition(".")
    where = list(getattr(sys.modules.get(parent), "__path__", [])) if dot else None
    return [parent + dot + module.name for module in pkgutil.iter_modules(where)]


def _suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def _told(error: BaseException) -> str:
    """`ValueError: depth must be positive (model.py:12)`, on one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_plumbing(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames  # rather theirs than torch's
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):
        place = f" ({os.path.basename(error.filename or '?')}:{error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _is_plumbing(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen importlib") or filename == importlib.__file__


def _checked(path: str, made: Any) -> Task:
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, getattr(made, "loss", None))
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model.factory {path} returned {type(module).__name__}, not a model; "
            "return a torch.nn.Module with a loss(output, y) method, or (module, loss_function)"
        )
    if not callable(loss):
        raise InputError(
            f"model.factory {path}: {type(module).__name__} has no loss; "
            "give it a method loss(output, y), or return (module, loss_function)"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"model.factory {path}: {type(module).__name__} has no parameter to train; return one that has"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError(
            f"model.factory {path}: the loss {type(loss).__name__} has parameters of its own, which nobody would "
            "train; make them part of the module"
        )
    return Task(module, loss)

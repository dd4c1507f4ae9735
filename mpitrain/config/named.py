"""Functions and classes of the user's own code that a setting names, as `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mpitrain.errors import InputError, refusal

_TRUST = "read it, then allow it with --trust (in Python trust=True)"
_SHOWN = 3  # names in a message
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def find(key: str, path: str) -> Callable[..., Any]:
    """Import and return the function or class that a setting names.

    Args:
        key: Name of the setting, for error messages.
        path: The function or class as package.module:name; modules in the working directory are found, too.

    Raises:
        InputError: The module or the name does not exist, is not callable, or its import failed. The error is not
            `agreed`, because the module may be missing on a single node.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise refusal(f"{key} {path!r} does not name a function; write package.module:function")
    module = _import(f"{key} {path}", module_name)
    function = getattr(module, name, None)
    if function is None:
        package = module.__name__.partition(".")[0]  # only names defined there, not imported ones
        homes = {
            other: str(getattr(value, "__module__", "")) for other, value in vars(module).items() if callable(value)
        }
        known = [other for other, home in homes.items() if home.partition(".")[0] == package and other[0] != "_"]
        otherwise = f"define it there, or name one of {', '.join(known[:_SHOWN])}" if known else "define it there"
        raise InputError(
            f"{key} {path}: {module.__file__ or module_name} has no function {name!r}; "
            + suggestion(name, known, otherwise)
        )
    if not callable(function):
        raise InputError(f"{key} {path}: {name} is {type(function).__name__}, not a function; name a function")
    result: Callable[..., Any] = function
    return result


def require_outside(key: str, path: str, folder: Path) -> None:
    """Import the module that a setting of a run names, but refuse to run code that lies in the run folder.

    Afterwards the run folder is last in `sys.path`, so that no file in it can replace an installed module.

    Args:
        key: Name of the setting, for error messages.
        path: The function or class as package.module:name.
        folder: The run folder.

    Raises:
        InputError: The module or one of its parent packages lies in `folder`; or it belongs to Python's standard
            library, which contains no models but many functions that execute their arguments.
    """
    module_name = path.partition(":")[0]
    _search_working_directory()
    sys.path.sort(key=lambda entry: _is_within(entry, folder))
    parts = module_name.split(".")
    if parts[0] in sys.stdlib_module_names:
        raise InputError(
            f"{key} {path} names {parts[0]} of Python's standard library, which has neither models nor metrics; "
            f"{_TRUST}"
        )
    for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        try:
            spec = importlib.util.find_spec(name) if name not in sys.modules else None
        except (ImportError, ValueError):
            return  # `find` says what is wrong
        if spec is None:
            continue
        if spec.origin is not None and _is_within(spec.origin, folder):
            raise InputError(
                f"{key} {path} would import {name} from {os.path.abspath(spec.origin)}, code that came with the run; "
                f"{_TRUST}"
            )
        _import(f"{key} {path}", name)


def _is_within(path: str, folder: Path) -> bool:
    """Return True if a path lies in the folder, either as written or after its symbolic links are resolved."""
    return any(Path(resolve(path)).is_relative_to(resolve(folder)) for resolve in (os.path.abspath, os.path.realpath))


def _search_working_directory() -> None:
    """Add the working directory to `sys.path`, as `python -m` does, however the job was started."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _import(named: str, module_name: str) -> ModuleType:
    _search_working_directory()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # a module that it imports may be the missing one: then report that one
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise InputError(f"{named}: {module_name} needs {describe_error(error)}; install it") from error
        # the package in which the module was expected, or all top-level modules
        parent, dot, _ = error.name.rpartition(".")
        where = list(getattr(sys.modules.get(parent), "__path__", [])) if dot else None
        beside = [parent + dot + module.name for module in pkgutil.iter_modules(where)]
        raise InputError(
            f"{named}: there is no module {error.name!r} in {os.getcwd()} or among the installed packages; "
            + suggestion(error.name, beside, "start the job in its folder, or install it")
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{named}: importing {module_name} raised {describe_error(error)}; fix it") from error


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean ...?" with the known name closest to a wrong one.

    Args:
        name: The wrong name.
        known: All valid names.
        otherwise: Text returned if no valid name is similar.
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def describe_error(error: BaseException) -> str:
    """Return one line with an error of the user's code and its place: `ValueError: depth is 0 (model.py:12)`."""
    plumbing = (_PACKAGE, "<frozen importlib", importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(plumbing)]
    user_frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames  # not torch's
    place = f" ({os.path.basename(user_frames[-1].filename)}:{user_frames[-1].lineno})" if user_frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({os.path.basename(error.filename or '?')}:{error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"

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
    """The function or class that a setting names.

    Args:
        key: Of the setting, for messages.
        path: package.module:name; the working directory is looked in as well.

    Raises:
        InputError: There is no such thing, or importing it failed. Not `agreed`: it may be missing on one node alone.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise refusal(f"{key} {path!r} names no function; write package.module:function")
    module = _import(f"{key} {path}", module_name)
    function = getattr(module, name, None)
    if function is None:
        package = module.__name__.partition(".")[0]  # what was defined there, not imported from elsewhere
        own = {other: str(getattr(value, "__module__", "")) for other, value in vars(module).items() if callable(value)}
        known = [other for other, home in own.items() if home.partition(".")[0] == package and other[0] != "_"]
        otherwise = f"define it there, or name one of {', '.join(known[:_SHOWN])}" if known else "define it there"
        raise InputError(
            f"{key} {path}: {module.__file__ or module_name} has no function {name!r}; "
            + suggestion(name, known, otherwise)
        )
    if not callable(function):
        raise InputError(f"{key} {path}: {name} is {type(function).__name__}, not a function; name one")
    found: Callable[..., Any] = function
    return found


def require_outside(key: str, path: str, folder: Path) -> None:
    """Import the module that a setting of a run names, unless that would run code which came with the run.

    From here on the run's folder is searched last, so that nothing in it hides an installed module.

    Args:
        key: Of the setting, for messages.
        path: package.module:name.
        folder: The run's folder.

    Raises:
        InputError: The module, or a package around it, lies in the folder, or the standard library is named, where no
            model is but much that runs what it is given.
    """
    module_name = path.partition(":")[0]
    _look_here()
    sys.path.sort(key=lambda entry: _is_within(entry, folder))
    parts = module_name.split(".")
    if parts[0] in sys.stdlib_module_names:
        raise InputError(f"{key} {path} names Python's own {parts[0]}, which has no such thing; {_TRUST}")
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
    """Return whether a path leads into the folder, by its name or by where its links end."""
    return any(Path(resolve(path)).is_relative_to(resolve(folder)) for resolve in (os.path.abspath, os.path.realpath))


def _look_here() -> None:
    """Have modules searched in the working directory, as `python -m` does, however the job was started."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _import(named: str, module_name: str) -> ModuleType:
    _look_here()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # its own import may be what is missing: then that is the message
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise InputError(f"{named}: {module_name} needs {told(error)}; install it") from error
        # the package that should have held it, or all top-level modules
        parent, dot, _ = error.name.rpartition(".")
        where = list(getattr(sys.modules.get(parent), "__path__", [])) if dot else None
        beside = [parent + dot + module.name for module in pkgutil.iter_modules(where)]
        raise InputError(
            f"{named}: there is no module {error.name!r} in {os.getcwd()} or among the installed packages; "
            + suggestion(error.name, beside, "start the job in its folder, or install it")
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{named}: importing {module_name} raised {told(error)}; mend it") from error


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question for the known name that is most like a wrong one; `otherwise` where none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def told(error: BaseException) -> str:
    """Return what the user's own code raised, and where, on one line: `ValueError: depth is 0 (model.py:12)`."""
    plumbing = (_PACKAGE, "<frozen importlib", importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(plumbing)]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames  # rather theirs than torch's
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):
        place = f" ({os.path.basename(error.filename or '?')}:{error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"

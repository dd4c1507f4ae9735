"""Reader of TOML files and values; every problem with a file becomes a one-line error that names the file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mpitrain.errors import refusal
from mpitrain.storage.disk import read_plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_LARGEST = 2 << 20  # bytes of a file
_PART = r"""(?<![\w-])(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_DEEP_KEY = re.compile(rf"(?:{_PART}\.[ \t]*){{64}}")  # the parser takes quadratic time for these


def read_toml(path: str) -> dict[str, Any]:
    """Return the values in a TOML file as nested dictionaries.

    Raises:
        InputError: The file is missing, unreadable, nested too deeply, or not TOML.
    """
    try:
        return _loads(read_plain(Path(path), _LARGEST).decode("utf-8"))
    except FileNotFoundError:
        raise refusal(f"config file {path} does not exist; give an existing TOML file") from None
    except OSError as error:
        raise refusal(f"config file {path} cannot be read ({error.strerror}); give a TOML file") from None
    except RecursionError:
        raise refusal(f"config file {path} is nested too deeply; give a TOML file") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, numbers of thousands of digits
        raise refusal(f"config file {path} is not TOML: {error}") from None


def toml_value(text: str) -> Any:
    """Return the Python value of a TOML value such as 3, 0.1, true or {a = 1}.

    Raises:
        ValueError: The text is not a TOML value.
        RecursionError: The value is nested too deeply.
    """
    return _loads(f"value = {text}")["value"]


def _loads(text: str) -> dict[str, Any]:
    if _DEEP_KEY.search(text):
        raise ValueError("a key has more than 64 parts")
    return dict(tomllib.loads(text))

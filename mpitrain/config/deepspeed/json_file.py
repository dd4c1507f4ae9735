"""Reading a DeepSpeed configuration from its file: JSON, also with comments and commas at an end, as DeepSpeed does."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from mpitrain.errors import refusal
from mpitrain.storage.disk import read_plain

_LARGEST = 1 << 20  # bytes of a file
# A string, or a comment, that has no end is one match up to where it breaks off: tried again from each of its
# characters, it would take quadratic time.
_STRING = r'"(?:[^"\\\n]|\\.)*"?'
_COMMENTS = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/|(/\*.*)", re.DOTALL)
_LAST_COMMAS = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError where there is none, or a key twice."""
    try:
        text = read_plain(path, _LARGEST).decode("utf-8-sig")
        try:
            values = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            plain = _kept_strings(_LAST_COMMAS, _kept_strings(_COMMENTS, text))
            try:
                values = json.loads(plain, object_pairs_hook=_once)
            except json.JSONDecodeError:
                raise error from None  # whose place is one of the file
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{path} cannot be read as JSON: {error}; mend the file") from None
    if not isinstance(values, dict):
        raise refusal(f"{path} holds no JSON object; give a DeepSpeed configuration")
    return values


def _kept_strings(pattern: re.Pattern[str], text: str) -> str:
    """The text without what the pattern matches, but for its groups: strings, and a comment without an end."""
    return pattern.sub(lambda match: match[match.lastindex] if match.lastindex else "", text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return found

"""`python -m mpitrain.bench`: names the commands that replace it. It will be removed in the next release."""

from __future__ import annotations

import sys

from mpitrain import early
from mpitrain.errors import InputError, exit_code_of

_ELSEWHERE = {
    "machine": "python -m mpitrain.plan --measure",
    "collectives --quick": "python -m mpitrain.doctor --check",
    "collectives --tune": "python -m mpitrain.doctor --tune",
}
_USAGE = "The benchmarks are in the folder benchmarks/ of the source code; run python -m benchmarks --help there.\n"


def usage() -> str:
    """Return a text that lists the replacements."""
    width = max(map(len, _ELSEWHERE))
    return _USAGE + "\n".join(f"  mpitrain.bench {old:{width}}  is now  {new}" for old, new in _ELSEWHERE.items())


def replacement_for(words: list[str]) -> str:
    """Return the command that replaces `mpitrain.bench` with the given arguments."""
    for old, new in _ELSEWHERE.items():
        name, *options = old.split()
        if words[:1] == [name] and set(options) <= set(words):
            return new
    return f"python -m benchmarks {' '.join(words)}, in the folder of the source code"


def main() -> int:
    """Raise an InputError that names the replacement."""
    raise InputError(f"mpitrain.bench was removed; use {replacement_for(sys.argv[1:])}")


if __name__ == "__main__":
    early.print_help(sys.argv[1:], usage)
    sys.exit(exit_code_of(main))

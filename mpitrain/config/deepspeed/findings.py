"""What is found while a configuration is read: all that is wrong, told at once, and what means nothing here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mpitrain.config.deepspeed.keys import INSTEAD, ONE_IS_OFF
from mpitrain.errors import InputError, refusal

_NEAR = 0.8  # of a misspelled key and the one that is meant
_MOST_COMPARED, _LONGEST = 1000, 100  # keys of a section, and characters of one, which are compared to what is known


def is_off(value: Any) -> bool:
    """Whether a key asks for nothing: it is false, or a section that is not enabled."""
    return not value or (isinstance(value, Mapping) and value.get("enabled", True) in (False, None))


class Findings:
    """Collects what is wrong in one configuration.

    Args:
        origin: What errors call the configuration.

    Attributes:
        ignored: Keys that mean nothing here.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._wrong: dict[str, str] = {}  # what is wrong -> how to mend it
        self.ignored: list[str] = []

    def wrong(self, what: str, mend: str) -> None:
        """Take note of something that cannot be read."""
        self._wrong[what] = mend

    def unsupported(self, key: str) -> None:
        """Take note of a key that asks for something that is not there."""
        self.wrong(f"{key} has no counterpart here", INSTEAD.get(key, INSTEAD.get(key.partition(".")[0], "remove it")))

    def section(self, name: str, given: Any) -> Mapping[str, Any]:
        """What should be a section; an empty one where there is none, or something else."""
        if given and not isinstance(given, Mapping):
            self.wrong(f"{name} {given!r:.80} is no section", 'write {"key": value, ...}')
        return given if isinstance(given, Mapping) else {}

    def number(self, name: str, given: Any) -> float:
        """What should be a number, also one that is written as text; 0 where it is something else."""
        try:
            if not isinstance(given, bool) and math.isfinite(value := float(given)):
                return value
        except (TypeError, ValueError, OverflowError):
            pass
        self.wrong(f"{name} {given!r:.80} is no number", "give one")
        return 0.0

    def whole(self, name: str, given: Any, least: int = 0) -> int:
        """Return a whole number of at least `least`; note the mistake and return `least` where it is something else."""
        value = self.number(name, given)
        if value == int(value) and least <= value < 2**53:
            return int(value)
        self.wrong(f"{name} {given!r:.80} is no whole number", f"give one from {least:,} on")
        return least

    @contextmanager
    def noting(self, where: str = "") -> Iterator[None]:
        """Take note of an InputError instead of raising it. where: what goes before it."""
        try:
            yield
        except InputError as error:
            what, _, mend = str(error).partition("; ")
            self.wrong(where + what, mend or "mend it")

    def look(
        self,
        section: Mapping[str, Any],
        name: str,
        taken: Collection[str],
        harmless: Collection[str] = (),
        refused: Collection[str] | None = None,
    ) -> None:
        """Look at the keys of a section that are not taken over.

        Args:
            section: Its values.
            name: What it is called, as `zero_optimization.`; empty for the outermost one.
            taken: The keys that are taken over.
            harmless: Keys that mean nothing, whatever they say.
            refused: Keys that are refused unless they are off; None: all that are neither taken nor harmless.
        """
        known = [*taken, *harmless, *(refused or ())]
        for number, key in enumerate(section):
            if key in taken:
                continue
            near = number < _MOST_COMPARED and key not in known
            meant = difflib.get_close_matches(key[:_LONGEST], known, n=1, cutoff=_NEAR) if near else []
            if meant and meant[0] not in harmless:
                self.wrong(f"{name}{key} is unknown", f"did you mean {meant[0]!r}?")
            elif key in harmless or meant or is_off(section[key]) or section[key] == ONE_IS_OFF.get(key):
                self.ignored.append(name + key)
            elif refused is None or key in refused:
                self.unsupported(name + key)
            else:
                self.ignored.append(name + key)  # DeepSpeed does not look at it either

    def tell(self) -> None:
        """Raise an InputError of all that is wrong, if anything is."""
        if len(self._wrong) == 1:
            ((what, mend),) = self._wrong.items()
            raise refusal(f"{self._origin}: {what}; {mend}")
        if self._wrong:
            raise refusal(f"{self._origin}: " + "; ".join(f"{what} ({mend})" for what, mend in self._wrong.items()))

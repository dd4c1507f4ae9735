"""Stop strings: texts at which a continuation ends, found as tokens come.

    stop "\\n\\n"    tokens give   "a" "b\\n" "c" "\\n" "\\nd"
                  passed on     "a" "b"   "\\nc"  ""   ""     then the text has ended

What may be the beginning of a stop string is held back until it is certain. The stop string is not part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import refusal
from mpitrain.inference.prompts import TextDecoder


def require_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings. Raises InputError for an empty one."""
    if "" in stops:
        raise refusal("--stop '': an empty text is at once there; give a text to stop at, or leave it out")
    return tuple(stops)


class StopWatch(TextDecoder):
    """A decoder of one continuation that looks for stop strings.

    Args:
        decoder: Makes text of the tokens.
        stops: Stop strings; none: all text is passed on at once.

    Attributes:
        found: Whether a stop string has come.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, stops
        self._held = ""
        self.found = False

    def add(self, token: int) -> str:
        """Return the text that certainly comes before any stop string."""
        return self._passed(self._decoder.add(token))

    def finish(self) -> str:
        """Return what was held back, if no stop string came of it."""
        text = self._passed(self._decoder.finish())
        return text if self.found else text + self._held

    def _passed(self, piece: str) -> str:
        if self.found:
            return ""
        text = self._held + piece
        places = [at for at in map(text.find, self._stops) if at >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        begun = (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        certain = len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain]

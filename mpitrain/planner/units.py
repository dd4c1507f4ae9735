"""Quantities as people write them: "100 Gbit/s", "256 GiB", "2 us", "60 Gflop/s", "90 %"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpitrain.errors import refusal

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", 1)}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9}
_TOO_LARGE = 1e300  # for any quantity; TOML's whole numbers have no bounds
_NUMBER = re.compile(r"([-+]?[0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*(.*)")
_DIGITS = 4  # of a number as it is written: no measurement is better


@dataclass(frozen=True)
class Unit:
    """What a quantity is measured in.

    Attributes:
        bases: By name, what one of it counts: of bytes {"B": 1, "bit": 1/8}.
        prefixes: By name, what they multiply that with.
        written: The base and the prefixes that a value is written with.
        example: A value as it may be written by hand.
    """

    bases: Mapping[str, float]
    prefixes: Mapping[str, float]
    written: tuple[str, Mapping[str, float]]
    example: str

    def parsed(self, value: object, where: str) -> float:
        """The number that a value of a TOML file stands for, in this unit's base.

        Args:
            value: A number, which counts bases, or text of a number and a unit.
            where: The file and the key, for the message.

        Raises:
            InputError: It is no such quantity, or not above 0.
        """
        found = self._number(value)
        if found is None or not math.isfinite(found) or found <= 0:
            raise refusal(f"{where} = {value!r:.100} is no quantity of this kind above 0; write {self.example}")
        return found

    def _number(self, value: object) -> float | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if value < _TOO_LARGE else None
        match = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return None
        factor = self._factor(match[2].strip())
        if factor is None:
            return None
        number = float(match[1].replace(",", "").replace("_", ""))
        return number * factor if factor >= 1 else number / round(1 / factor)  # 20 us are 2e-5 s to the last bit

    def _factor(self, unit: str) -> float | None:
        if not unit:
            return 1.0
        for base, counts in self.bases.items():
            if unit.endswith(base) and (prefix := unit[: -len(base) or None].strip()) in self.prefixes:
                return counts * self.prefixes[prefix]
        return None

    def text(self, value: float) -> str:
        """The value as a file tells it, with four digits, in the largest unit of which it is one or more."""
        base, prefixes = self.written
        value /= self.bases.get(base, 1.0)
        fitting = [prefix for prefix, factor in prefixes.items() if value >= factor * (1 - 1e-9)]
        prefix = max(fitting or prefixes, key=lambda p: prefixes[p] * (1 if fitting else -1))
        return f"{_plain(value / prefixes[prefix])} {prefix}{base}".strip()


def _plain(number: float) -> str:
    """Four digits, and no exponent where it can be read without."""
    rounded = float(f"{number:.{_DIGITS}g}")
    return f"{rounded:.0f}" if rounded == int(rounded) and abs(rounded) < 1e6 else f"{rounded:.{_DIGITS}g}"


def _per_second(bases: Mapping[str, float]) -> dict[str, float]:
    return {f"{base}{per}": counts for base, counts in bases.items() for per in ("/s", "ps")}


_BYTES = {"bytes": 1.0, "byte": 1.0, "B": 1.0}
_BITS = {"bits": 1 / 8, "bit": 1 / 8, "b": 1 / 8}
_OPERATIONS = dict.fromkeys(("flop/s", "flops", "FLOP/s", "FLOPS", "FLOPs", "flop", "Flop/s", "Flops", "/s"), 1.0)
_ELEMENTS = {"elements/s": 1.0, "element/s": 1.0, "/s": 1.0}
_UP, _LARGE = {p: _DECIMAL[p] for p in ("", "k", "M", "G", "T")}, {p: _DECIMAL[p] for p in ("M", "G", "T")}

BYTES = Unit(_BYTES, _DECIMAL | _BINARY, ("B", {"": 1.0} | _BINARY), '"256 GiB"')
BYTE_RATE = Unit(_per_second(_BYTES | _BITS), _DECIMAL | _BINARY, ("B/s", _UP), '"200 GB/s" or "100 Gbit/s"')
BIT_RATE = Unit(BYTE_RATE.bases, BYTE_RATE.prefixes, ("bit/s", _UP), BYTE_RATE.example)
SECONDS = Unit(
    {"seconds": 1.0, "second": 1.0, "s": 1.0}, _SMALL, ("s", {p: _SMALL[p] for p in ("", "m", "u", "n")}), '"2 us"'
)
OPERATIONS = Unit(_OPERATIONS, _DECIMAL, ("flop/s", _LARGE), '"60 Gflop/s"')
ELEMENTS = Unit(_ELEMENTS, _DECIMAL, ("elements/s", {p: _DECIMAL[p] for p in ("", "M")}), '"300 Melements/s"')
FRACTION = Unit({"%": 0.01}, {"": 1.0}, ("%", {"": 1.0}), '0.9 or "90 %"')
COUNT = Unit({}, {}, ("", {"": 1.0}), "128")


def size_of(text: str, option: str) -> float:
    """Return the bytes of a command line's size, as 32GiB, 1.5gb or 64. Raises InputError, which names the option."""
    return BYTES.parsed(text.upper().replace("I", "i"), option)

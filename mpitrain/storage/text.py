"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import printable

_LONGEST = 2000  # characters of a text


_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES = ((1024.0**4, " TiB"), (1024.0**3, " GiB"), (1024.0**2, " MiB"), (1024.0, " KiB"), (1.0, " bytes"))
_SECONDS = ((1.0, " s"), (1e-3, " ms"), (1e-6, " us"))


def short(number: float) -> str:
    """At most 5 characters up to a thousand billions: 7.5, 950, 12.3k, 4.07M, 1.21G, 3.1T."""
    if abs(number) >= 1e18:
        return f"{max(-1e300, min(number, 1e300)):.3g}"
    return _scaled(number, _COUNTS)


def bytes_text(nbytes: float) -> str:
    """Return bytes as people read them: 12.3 GiB, 456 MiB, 7.8 KiB, 12 bytes."""
    return _scaled(nbytes, _BYTES)


def seconds_text(seconds: float) -> str:
    """Return a time as programmers read it: 12.3 s, 4.56 ms, 78 us."""
    return _scaled(seconds, _SECONDS)


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Return three digits, and none of thousands left out, in the unit that rounding gives fewer than 1000 of."""
    size, unit = next((each for each in units if abs(number) >= each[0] * 0.9995), units[-1])
    scaled = number / size
    return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.3g}{unit}"


def number_text(value: object, form: str = ".4g", otherwise: str = "not finite") -> str:
    """Return a number of a record in this form, or what stands for null."""
    return format(value, form) if isinstance(value, (int, float)) else otherwise


def duration(seconds: float) -> str:
    """hours:minutes:seconds, such as 0:04:12 or 117:00:03; -:--:-- when it is not known."""
    if not 0 <= seconds < 1e9:  # also NaN
        return "-:--:--"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def lasting(seconds: float) -> str:
    """A time as people say it: 0.045 s, 2.1 s, 12 minutes, 4.3 hours, 45 days."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    size, unit = next((each for each in units if seconds / each[0] >= 2.0), (1.0, "s"))
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 9.95 else f"{number:.2g} {unit}"


def counted(number: int, noun: str) -> str:
    """1 rank, 8 ranks, 1,234,567 samples."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rates_text(samples: float, tokens: float) -> str:
    """Return how fast steps were, in samples and tokens a second of the time that steps took."""
    return f"{short(samples)} samples/s" + (f" ({short(tokens)} tokens/s)" if tokens else "") + " in steps"


def spoken(figure: str) -> str:
    """The name of a figure as people say it: token_accuracy without its _, "loss of my_set" with that of the set."""
    what, of, whose = figure.partition(" of ")
    return what.replace("_", " ") + of + whose


def aligned(rows: list[tuple[str, str]]) -> str:
    """Lines of `  label   text`, the texts under one another, each on one line."""
    rows = [(printable(label, _LONGEST), printable(text, _LONGEST)) for label, text in rows]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:{width}}   {text}".rstrip() for label, text in rows)

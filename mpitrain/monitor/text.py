"""Numbers as people read them."""

from __future__ import annotations

from mpitrain.errors import printable

_LONGEST = 2000  # characters of a text


def short(number: float) -> str:
    """At most 5 characters up to a thousand billions: 7.5, 950, 12.3k, 4.07M, 1.21G, 3.1T."""
    if abs(number) >= 1e18:
        return f"{max(-1e300, min(number, 1e300)):.3g}"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # from where rounding would give 1000 of the next smaller unit
        if abs(number) >= factor * 0.9995:
            return (
                f"{number / factor:.3g}{letter}" if abs(number) < factor * 999.5 else f"{number / factor:.0f}{letter}"
            )
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """hours:minutes:seconds, such as 0:04:12 or 117:00:03; -:--:-- when it is not known."""
    if not 0 <= seconds < 1e9:  # also NaN
        return "-:--:--"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def lasting(seconds: float) -> str:
    """A time as people say it: 0.045 s, 2.1 s, 12 minutes, 4.3 hours, 45 days."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "s")):
        number = seconds / size
        if number >= 2.0 or unit == "s":
            break
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

"""Numbers, sizes and times formatted for people."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import printable

_LONGEST = 2000  # characters of a label or text


_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES = ((1024.0**4, " TiB"), (1024.0**3, " GiB"), (1024.0**2, " MiB"), (1024.0, " KiB"), (1.0, " bytes"))
_SECONDS = ((1.0, " s"), (1e-3, " ms"), (1e-6, " us"))


def short(number: float) -> str:
    """Format a number in at most 5 characters up to 1e15: 7.5, 950, 12.3k, 4.07M, 1.21G, 3.1T."""
    if abs(number) >= 1e18:
        return f"{max(-1e300, min(number, 1e300)):.3g}"
    return _scaled(number, _COUNTS)


def bytes_text(nbytes: float) -> str:
    """Format a number of bytes: 12.3 GiB, 456 MiB, 7.8 KiB, 12 bytes."""
    return _scaled(nbytes, _BYTES)


def seconds_text(seconds: float) -> str:
    """Format a short time: 12.3 s, 4.56 ms, 78 us."""
    return _scaled(seconds, _SECONDS)


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Format a number with three significant digits, in the largest unit that does not exceed it.

    Integer digits are never dropped. The unit is chosen after rounding, so that 999.9 k becomes 1 M.
    """
    size, unit = next((each for each in units if abs(number) >= each[0] * 0.9995), units[-1])
    scaled = number / size
    return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.3g}{unit}"


def number_text(value: object, form: str = ".4g", otherwise: str = "not finite") -> str:
    """Format a number from a record; return `otherwise` for null.

    Args:
        value: Number, or None.
        form: Format specification.
        otherwise: Text for a value that is not a number.
    """
    return format(value, form) if isinstance(value, (int, float)) else otherwise


def duration(seconds: float) -> str:
    """Format a time as hours:minutes:seconds, such as 0:04:12 or 117:00:03; -:--:-- if it is unknown."""
    if not 0 <= seconds < 1e9:  # also NaN
        return "-:--:--"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def duration_text(seconds: float) -> str:
    """Return a duration as text, such as 0.045 s, 2.1 s, 12 minutes, 4.3 hours or 45 days."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    size, unit = next((each for each in units if seconds / each[0] >= 2.0), (1.0, "s"))
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 9.95 else f"{number:.2g} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1: 1 rank, 8 ranks, 1,234,567 samples.

    Args:
        number: Number of things.
        noun: Name of one thing; the plural adds an s.
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rates_text(samples: float, tokens: float) -> str:
    """Return the training speed as text, such as 512 samples/s (65.5k tokens/s) in steps.

    Args:
        samples: Samples per second of the time spent in steps.
        tokens: Tokens per second of that time; 0 if the samples are not tokens.
    """
    return f"{short(samples)} samples/s" + (f" ({short(tokens)} tokens/s)" if tokens else "") + " in steps"


def arithmetic_text(tflops: float, share: float) -> str:
    """Return a rank's useful arithmetic as text, such as 0.012 TFLOP/s per rank, 34 % of the peak.

    Args:
        tflops: TFLOP/s of a rank.
        share: Share of the peak of the hardware; 0 or NaN if the peak is unknown.
    """
    return f"{tflops:.3g} TFLOP/s per rank" + (f", {100 * share:.3g} % of the peak" if share > 0 else "")


def with_spaces(figure: str) -> str:
    """Return the name of a figure with spaces instead of underscores: token_accuracy becomes "token accuracy".

    The name of a data set after " of ", as in "loss of my_set", is kept unchanged.
    """
    name, separator, data_set = figure.partition(" of ")
    return name.replace("_", " ") + separator + data_set


def align_rows(rows: list[tuple[str, str]]) -> str:
    """Return lines `  label   text`, one for each row, with the texts aligned in a column."""
    rows = [(printable(label, _LONGEST), printable(text, _LONGEST)) for label, text in rows]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:{width}}   {text}".rstrip() for label, text in rows)

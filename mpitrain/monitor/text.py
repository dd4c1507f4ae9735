"""Names of `storage.text` that the benchmarks import from here."""

from mpitrain.storage.text import aligned, counted

__all__ = ["aligned", "counted"]

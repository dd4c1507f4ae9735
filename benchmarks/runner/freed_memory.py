"""Has the C library give freed memory back to the system: it would count as taken in what is measured next."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Give back what can be; nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

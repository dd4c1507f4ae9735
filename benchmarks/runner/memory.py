"""Memory that ranks take while a model is made and trained, above what each had before.

While a model is made that is the most of a rank's own pages and of its part of the pages that the ranks of its node
share, both together; in training the most of its own pages, and its part of the shared ones at the end. A page that k
ranks have touched counts 1/k in each, so that a sum over the ranks of a node is what the node gives.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpitrain.comm import Communicator
from mpitrain.storage import proc

PIECE, LARGE = 128 << 10, 32 << 20  # bytes from which on glibc takes memory from the system: at first, and at most
_MMAP_THRESHOLD = -3  # the number of that setting
_EVERY = 0.005  # seconds between two looks at memory


class PeakMemory:
    """The most memory of this rank while a model is made, and then trained. Collective to make.

    Args:
        world: The ranks.
        watching: Whether to look at all: a thread that looks now and then slows the others down.
    """

    def __init__(self, world: Communicator, watching: bool = True) -> None:
        self._watching = watching
        gc.collect()
        give_back()
        world.barrier()
        self._own, self._shared = _own_bytes(), _part_of("Pss_Shmem")
        self.taken = 0  # bytes above those before

    @contextmanager
    def making(self) -> Iterator[None]:
        """Watch while the model is made."""
        with self._peak(lambda: _own_bytes() + _part_of("Pss_Shmem")) as most:
            yield
        self._take(most[0])

    @contextmanager
    def training(self) -> Iterator[None]:
        """Watch while it is trained."""
        with self._peak(_own_bytes) as most:
            yield
            shared = _part_of("Pss_Shmem")
        self._take(most[0] + max(shared, self._shared))

    def process(self) -> int:
        """Return the most bytes of the whole process, libraries included."""
        return self._own + self._shared + self.taken + _part_of("Pss_File")

    def _take(self, nbytes: int) -> None:
        self.taken = max(self.taken, nbytes - self._own - self._shared)

    @contextmanager
    def _peak(self, nbytes: Callable[[], int]) -> Iterator[list[int]]:
        """Yield a list of one figure, the most that `nbytes` has returned so far."""
        most, done = [nbytes()], threading.Event()
        if not self._watching:
            yield most
            return

        def watch() -> None:
            while not done.wait(_EVERY):
                most[0] = max(most[0], nbytes())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield most
        finally:
            done.set()
            thread.join()


def give_back() -> None:
    """Have glibc give freed memory back to the system, which else counts as taken in what is measured next."""
    _glibc("malloc_trim", 0)


def take_from_system(nbytes: int) -> None:
    """Have glibc take pieces of at least so many bytes from the system, and give them back when they are freed."""
    _glibc("mallopt", _MMAP_THRESHOLD, nbytes)


def _glibc(name: str, *arguments: int) -> None:
    """Call one of its functions; do nothing where the C library is another."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def _own_bytes() -> int:
    """Bytes of pages that no other process has: what was allocated, not what is shared with the node's ranks."""
    return proc.nbytes_of("self/status", "RssAnon") or 0


def _part_of(kind: str) -> int:
    """This process' part of memory that processes share, each page divided by those that have touched it; proc(5)."""
    return proc.nbytes_of("self/smaps_rollup", kind) or 0

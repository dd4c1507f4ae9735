"""Random numbers of a script that sets no seed: other ones in each run, as in one process, and equal on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpitrain.run.session import ScriptRun


def agree_on_seed(session: ScriptRun) -> int:
    """Return a seed that is another one in each run, and equal on all ranks. Collective.

    Args:
        session: Run of the script.
    """
    seed: int = session.world.broadcast_object(random.SystemRandom().randrange(2**32))
    return seed


def set_seeds(seed: int) -> random.Random:
    """Seed the generators of torch, Python and NumPy, and those that are made without a seed later.

    Returns:
        Generator of the seeds of those.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    source = random.Random(seed)  # of later seeds, in the same order on all ranks

    def draw() -> int:
        return source.randrange(2**32)

    for module, name in ((np.random, "seed"), (np.random, "default_rng"), (random, "seed")):
        setattr(module, name, _with_seed(getattr(module, name), draw))

    def seed_torch() -> int:
        value = draw()
        torch.manual_seed(value)
        return value

    torch.seed = torch.random.seed = seed_torch

    class AgreedSequence(np.random.SeedSequence):
        """Sequence of seeds that begins with an agreed one where its caller gives none."""

        def __init__(self, entropy: Any = None, **options: Any) -> None:
            super().__init__(draw() if entropy is None else entropy, **options)

    np.random.SeedSequence = AgreedSequence  # type: ignore[misc]
    return source


def _with_seed(original: Callable[..., Any], draw: Callable[[], int]) -> Callable[..., Any]:
    """Return a function whose first argument is a seed, and which gets the next agreed seed where that is missing."""

    def function(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(draw() if seed is None and not kwargs else seed, *args, **kwargs)

    return function

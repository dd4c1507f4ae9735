"""Shapes of the messages in a pipeline of which only one rank exists (see `mpitrain.comm.rehearsal`).

A rank learns the shapes of its input from the header that the rank before sends. Where nobody sends, the stages before
are passed through without values: their parameters are fake tensors, which take neither memory nor time.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpitrain.pipe.wire import OutputSpec, map_tensors


class ForeseenShapes:
    """Outputs of all stages but the last, without values.

    Args:
        blocks: Blocks of the whole model, as this rank has them.
        bounds: Bounds of the stages, as those of `Pipeline`.

    Attributes:
        blocks: Copies of the blocks, without values.
    """

    def __init__(self, blocks: Sequence[nn.Module], bounds: Sequence[int]) -> None:
        self._mode, self._bounds = FakeTensorMode(allow_non_fake_inputs=True), bounds
        tensors = [t for block in blocks for t in (*block.parameters(), *block.buffers())]
        memo: dict[int, Any] = {id(t): self._mode.from_tensor(t) for t in tensors}
        self.blocks = nn.ModuleList(copy.deepcopy(list(blocks[: bounds[-2]]), memo))

    def of(self, x: Any) -> dict[int, OutputSpec]:
        """Return the shapes of each stage's output.

        Args:
            x: Input of the model for one microbatch.
        """
        specs = {}
        with self._mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # nobody uses its address
            x = map_tensors(self._mode.from_tensor, x)
            for stage, (lo, hi) in enumerate(pairwise(self._bounds[:-1])):
                for block in self.blocks[lo:hi]:
                    x = block(x)
                specs[stage] = OutputSpec.of(x)
        return specs

"""Average of the weights over the steps of a run, kept for this rank's flat parameters.

    ema     average <- decay * average + (1 - decay) * weights      (Polyak and Juditsky 1992, with forgetting)
    swa     average <- mean of all weights that were added          (Izmailov et al. 2018)

Both begin with the weights that are added first, as `torch.optim.swa_utils.AveragedModel` does, and both are one
interpolation of each element. A rank therefore averages only what its optimizer updates, and sends nothing. Saved
floating-point buffers, such as the running statistics of batch norms, are averaged on every rank that has them, as with
`use_buffers=True` in torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.shard.sharding import Sharding


class WeightAverage:
    """Average of a sharding's weights.

    Args:
        sharding: Parameters and their optimizer.
        decay: Part of the average that remains when weights are added; None for the mean of all that were added.

    Attributes:
        count: Number of times that weights were added.
    """

    def __init__(self, sharding: Sharding, decay: float | None) -> None:
        self._sharding, self._decay, self.count = sharding, decay, 0
        saved, buffers = set(sharding.module.state_dict()), sharding.module.named_buffers()
        self._names = [name for name, buffer in buffers if name in saved and buffer.is_floating_point()]

    @torch.no_grad()
    def add(self) -> None:
        """Add the present weights to the average."""
        fraction = 1 / (self.count + 1) if self._decay is None else 1 - self._decay
        averages = self._sharding.buffer_averages
        for name, buffer in self._buffers():
            if self.count == 0:
                averages[name] = buffer.clone()
            else:
                averages[name].lerp_(buffer, fraction)
        for flat in self._sharding.flat_parameters:
            if self.count == 0:
                flat.average = flat.value.detach().clone()
            else:
                _average_of(flat).lerp_(flat.value.detach(), fraction)
        self.count += 1

    def begin_load(self, count: int) -> None:
        """Make room for an average that is then read into the flat parameters.

        Args:
            count: Number of times that weights were added to it; 0 if there is none.
        """
        self.count = count
        self._sharding.buffer_averages = {name: torch.zeros_like(b) for name, b in self._buffers() if count}
        for flat in self._sharding.flat_parameters:
            flat.average = torch.zeros_like(flat.value.detach()) if count else None

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and average, on every rank. A second call restores both bit by bit. Collective."""
        sharding = self._sharding
        sharding.comm.barrier()  # a rank may still read weights that ranks share
        sharding.parameters.finish_backward()  # drop weights that an earlier pass may have gathered
        if sharding.host is not None:
            sharding.host.before_update()
        for flat in sharding.flat_parameters:
            value, average = flat.value.detach(), _average_of(flat)
            weights = value.clone()
            value.copy_(average)
            average.copy_(weights)
            flat.store() if sharding.host is None else sharding.host.store(flat)
        if sharding.host is not None:
            sharding.host.end()
        for name, buffer in self._buffers():
            value, average = buffer.clone(), sharding.buffer_averages[name]
            buffer.copy_(average)
            average.copy_(value)
        sharding.parameters.publish()

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that are averaged, with their names; a module may have replaced them."""
        for name in self._names:
            yield name, self._sharding.module.get_buffer(name).detach()


def _average_of(flat: FlatParameter) -> torch.Tensor:
    """Return the average of a flat parameter, which must have one."""
    assert flat.average is not None
    return flat.average

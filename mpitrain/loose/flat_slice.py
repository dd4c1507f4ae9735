"""The stretch of a group's parameters that one of its ranks carries to the other groups.

What several ranks of a group all have, laid end to end, is cut into equal slices, and each of these ranks averages its
own with the ranks of the same place in the other groups; then the slices are gathered inside of the group:

    group 0, rank 0   [A] b     all-reduce of A with group 1's rank 0      A B
             rank 1    a [B]    all-reduce of B with group 1's rank 1      A B    all-gather in the group

So what goes between groups is sent once a group, not once a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mpitrain.comm import Communicator

_MULTIPLE = 16  # elements that slices begin at multiples of


class FlatSlice:
    """This rank's slice of tensors laid end to end.

    Args:
        tensors: Of one dtype on one device; alike on the ranks of `holders`.
        holders: The ranks that have all of them; None for this one alone.

    Attributes:
        length: Elements of each rank's slice; those behind the last tensor are zeros.
        stretches: (number of a tensor, first, last, place): its elements [first, last) begin at `place` of the slice.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], holders: Communicator | None) -> None:
        self._tensors, self._holders = list(tensors), holders if holders is not None and holders.size > 1 else None
        total = sum(t.numel() for t in self._tensors)
        ranks, rank = (self._holders.size, self._holders.rank) if self._holders is not None else (1, 0)
        self.length = -(-total // (ranks * _MULTIPLE)) * _MULTIPLE
        self.stretches = list(self._within(rank * self.length, (rank + 1) * self.length))
        self._everything = list(self._within(0, ranks * self.length))

    def _within(self, lo: int, hi: int) -> Iterable[tuple[int, int, int, int]]:
        """What of the tensors lies in elements [lo, hi) of the whole; as `stretches`, with places counted from lo."""
        begin = 0
        for number, tensor in enumerate(self._tensors):
            first, last = max(lo, begin), min(hi, begin + tensor.numel())
            if first < last:
                yield number, first - begin, last - begin, first - lo
            begin += tensor.numel()

    def empty(self) -> torch.Tensor:
        """Zeros, as many as the slice has elements."""
        return torch.zeros(self.length, dtype=self._tensors[0].dtype, device=self._tensors[0].device)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """A copy of the slice as it is."""
        found = self.empty()
        for number, first, last, place in self.stretches:
            tensor = self._tensors[number].detach().contiguous().view(-1)
            found[place : place + last - first].copy_(tensor[first:last])
        return found

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Give the tensors the values that the ranks have for their slices. Collective over the holders."""
        whole, stretches = values, self.stretches
        if self._holders is not None:
            whole, stretches = values.new_empty(self._holders.size * self.length), self._everything
            self._holders.all_gather(whole, values)
        for number, first, last, place in stretches:
            tensor = self._tensors[number].detach()
            dense = tensor if tensor.is_contiguous() else tensor.contiguous()
            dense.view(-1)[first:last].copy_(whole[place : place + last - first])
            if dense is not tensor:
                tensor.copy_(dense)


def by_kind(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of tensors that have the same dtype and device, together."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), []).append(number)
    return list(found.values())

"""A model profile with made-up costs, for tests of code that computes with them."""

from __future__ import annotations

from mpitrain.parallel.costs import AxisExchange, BlockCost, Divided, ModelProfile, Weight


class FakeModel(ModelProfile):
    """A model of an embedding, equal blocks and a tied head; its seconds are proportional to the samples."""

    def __init__(self, layers: int = 4, batch: int = 16, numel: int = 1 << 16, seconds: float = 0.01) -> None:
        self.batch, self.precision, self.moments, self.sample_bytes = batch, "fp32", 2, 1024
        self.listed = self.divisible = True
        self.layers, self.numel, self.seconds = layers, numel, seconds
        self.order = ["embedding.weight", *(f"blocks.{n}.weight" for n in range(layers))]

    def blocks(self, samples: int, divided: Divided = Divided(), threads: int = 1) -> tuple[BlockCost, ...]:
        once = self.seconds * samples / divided.slices / threads
        act = 4096 * samples // divided.slices
        exchanges = (AxisExchange("all_reduce", act),) if divided.tensor > 1 else ()
        table = Weight("embedding.weight", self.numel // divided.tensor, replicated=False)
        first = BlockCost("embedding", once / 10, 0.0, once / 10, 0, 64, act, act, (table,))
        middle = [
            BlockCost(
                f"blocks.{n}",
                once / divided.tensor,
                once / divided.tensor,
                once / divided.tensor,
                8 * act // divided.tensor,
                act,
                act,
                2 * act,
                (Weight(f"blocks.{n}.weight", self.numel // divided.tensor, replicated=False),),
                exchanges,
                exchanges,
            )
            for n in range(self.layers)
        ]
        tied = Weight("head.weight", self.numel // divided.tensor, replicated=False, same_as="embedding.weight")
        return (first, *middle, BlockCost("head", once / 5, once / 5, once / 5, act, act, 4, act, (tied,)))

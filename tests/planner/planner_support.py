"""A model with made-up costs, and a predictor that needs no simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from mpitrain.errors import refusal
from mpitrain.parallel.costs import AxisExchange, BlockCost, Divided, ModelProfile, Weight
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.planner.predictor import Prediction

WORD, WIDTH, TOKENS = 4, 256, 64


def block(seconds: float, saved_bytes: int = 0, output_bytes: int = 0, numel: int = 0, name: str = "b") -> BlockCost:
    weights = (Weight(f"{name}.weight", numel),) if numel else ()
    return BlockCost(name, seconds, seconds, seconds, saved_bytes, output_bytes, output_bytes, 0, weights)


class MadeUpModel(ModelProfile):
    """A model of an embedding, blocks of two pairs of layers each, and a head; every layer can be divided."""

    def __init__(self, blocks: int = 8, batch: int = 64, rate: float = 1e10, vocabulary: int = 1000) -> None:
        self.batch, self.precision, self.moments, self.sample_bytes = batch, "fp32", 2, 8 * TOKENS
        self.listed = self.divisible = True
        self.rate, self.vocabulary = rate, vocabulary
        self._known: dict[tuple[int, Divided], tuple[BlockCost, ...]] = {}
        self.names = ["embedding", *(f"blocks.{n}" for n in range(blocks)), "head"]
        self.order = [weight.name for each in self.blocks(1) for weight in each.weights]

    def blocks(self, samples: int, divided: Divided = Divided(), threads: int = 1) -> tuple[BlockCost, ...]:
        if divided.tensor > 8:
            raise refusal("8 heads cannot be divided evenly over these ranks")
        if divided.slices > TOKENS:
            raise refusal("too many slices")
        if (samples, divided) not in self._known:
            self._known[samples, divided] = tuple(self._block(name, samples, divided) for name in self.names)
        return self._known[samples, divided]

    def _block(self, name: str, samples: int, divided: Divided) -> BlockCost:
        pairs = {"embedding": [""], "head": [""]}.get(name, ["attention", "mlp"])
        size = self.vocabulary * WIDTH if pairs == [""] else 8 * WIDTH * WIDTH
        tokens = samples * TOKENS // divided.slices
        vector, seconds, weights, exchanges, activation_bytes = tokens * WIDTH * WORD, 2e-4, [], [], 0
        for pair in pairs:
            layers = [f"{name}.{pair}.{side}" for side in ("up", "down")] if pair else [name]
            chosen = [any(fnmatchcase(layer, pattern) for pattern in divided.whole) for layer in layers]
            if any(chosen) and not all(chosen):
                raise refusal(f"{layers} are a pair")
            ranks = 1 if all(chosen) else divided.tensor
            seconds += 2 * tokens * size / ranks / self.rate
            activation_bytes += 2 * vector // ranks
            weights += [Weight(f"{layer}.weight", size // len(layers) // ranks, ranks == 1) for layer in layers]
            exchanges += [AxisExchange("all_reduce", vector)] if ranks > 1 else []
        again = tuple(exchanges)
        return BlockCost(
            name, seconds, seconds, seconds, activation_bytes, vector, vector, vector, tuple(weights), again, again
        )


class MadeUpPredictor:
    """A predictor of seconds and bytes by short formulas."""

    def __init__(self, model: ModelProfile, room: float, layouts: Sequence[ParallelLayout] = ()) -> None:
        self.model, self._room, self.simulations = model, room, 0
        self.layouts = layouts

    def room(self) -> float:
        return self._room

    def host_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        return {}

    def host_room(self) -> float:
        return 0.0

    def lower_bound(self, layout: ParallelLayout) -> float:
        if layout.microbatch == 3:
            raise refusal("three is impossible")
        blocks = self.model.blocks(layout.microbatch, Divided(layout.tensor, layout.sequence, layout.whole))
        once = sum(each.forward + each.input + each.weight for each in blocks)
        return once * self.model.batch / layout.data / layout.microbatch / layout.pipeline

    def guess(self, layout: ParallelLayout) -> float:
        return self.lower_bound(layout) * (1 + layout.zero)

    def least_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        return {"activations": self.memory(layout)["activations"]}

    def memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        blocks = self.model.blocks(layout.microbatch, Divided(layout.tensor, layout.sequence, layout.whole))
        numel = sum(weight.numel for each in blocks for weight in each.weights) / layout.pipeline
        activations = sum(each.input_bytes if layout.recompute else each.saved_bytes for each in blocks)
        states = 0 if layout.offload else 8 * numel / (layout.data if layout.zero else 1)
        gradients = 4 * numel / (layout.data if layout.zero > 1 else 1)
        return {"parameters": 4 * numel, "gradients": gradients, "states": states, "activations": float(activations)}

    def predict(self, layout: ParallelLayout) -> Prediction:
        self.simulations += 1
        compute = self.lower_bound(layout) * (4 / 3 if layout.recompute else 1)
        parts = {
            "compute": compute,
            "tensor": 1e-4 * (layout.tensor - 1) * 20,
            "pipeline": compute * (layout.pipeline - 1) / 8,
            "gradients": 1e-3 * (layout.data > 1) * (1 + 0.1 * layout.zero),
            "other": 1e-3 + 1e-2 * bool(layout.offload),
        }
        return Prediction(layout, sum(parts.values()), parts, self.memory(layout), self.model.batch)

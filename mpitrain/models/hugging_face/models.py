"""Models of transformers as the trainer wants them: a tensor in, scores out, and a criterion for these."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from mpitrain.choices import one_of
from mpitrain.errors import refusal
from mpitrain.models.hugging_face.facade import Facade
from mpitrain.models.hugging_face.families import FAMILIES, Blocks, Family
from mpitrain.models.losses import cross_entropy
from mpitrain.models.task import Criterion


class HuggingFaceModel(Facade):
    """A model of transformers: its input by itself, as tensor -> its scores by themselves.

    Args:
        module: Of transformers.
        named: How messages name it.
    """

    criterion: Criterion

    def __init__(self, module: Any, named: str) -> None:
        super().__init__(module)
        self.named = named
        self.criterion = cross_entropy
        self._constant = {"use_cache": False} if "use_cache" in _accepted(module) else {}

    @property
    def undivided(self) -> str:
        """Why neither stages nor tensor ranks can have parts of it, and what to do instead."""
        return (
            f"{self.named}: how {type(self.inner).__name__} is divided is known for {one_of(sorted(FAMILIES))}; use "
            "parallel.data and parallel.zero, and set parallel.pipeline and parallel.tensor to 1"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x, **self._constant).logits
        return scores

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats."""
        return self.criterion(output, y)


class KnownLanguageModel(HuggingFaceModel):
    """A causal language model of a known family: tokens [batch, sequence] -> scores [batch, sequence, vocabulary].

    Args:
        module: Of transformers.
        named: How messages name it.
        family: What is known of it.
        sequence: Tokens of a sample.

    Attributes:
        counts_positions: Positions are counted in hidden states, which therefore must be of whole sequences.
    """

    counts_positions = True

    def __init__(self, module: Any, named: str, family: Family, sequence: int) -> None:
        super().__init__(module, named)
        self._family, self._sequence = family, sequence

    def pipeline_blocks(self) -> Blocks:
        """(name, module) in order; feeding tokens through them equals `model(tokens)`."""
        config = self.inner.config
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if window is not None and window < self._sequence:
            raise refusal(
                f"{self.named}: its attention sees {window} tokens, which stages of a pipeline cannot be told; set "
                f"model.sequence to {window}, or parallel.pipeline to 1"
            )
        attention = getattr(config, "_attn_implementation", "sdpa")
        if attention != "sdpa":
            raise refusal(
                f"{self.named}: stages of a pipeline compute with attn_implementation sdpa, not {attention}; leave "
                "it out of model.options, or set parallel.pipeline to 1"
            )
        return self._family.blocks(self)

    def tensor_plan(self) -> dict[str, str]:
        """How each layer may be divided over ranks. `criterion` then has to take divided scores."""
        return dict(self._family.plan)


class ImageClassifier(HuggingFaceModel):
    """Images as a data set has them -> scores of the classes [batch, classes].

    Args:
        module: Of transformers.
        named: How messages name it.
        channels: Of the images that the model takes; grey ones are repeated for as many.
        last: Whether images are [height, width, channels], rather than [channels, height, width].
    """

    def __init__(self, module: Any, named: str, channels: int, last: bool) -> None:
        super().__init__(module, named)
        self._channels, self._last = channels, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x.movedim(-1, 1) if self._last else x
        return super().forward(x.expand(-1, self._channels, -1, -1) if x.shape[1] == 1 else x)


class SequenceClassifier(HuggingFaceModel):
    """Tokens [batch, sequence] -> scores of the classes [batch, classes].

    Args:
        module: Of transformers.
        named: How messages name it.
        padding: The token that does not count.
    """

    def __init__(self, module: Any, named: str, padding: int) -> None:
        super().__init__(module, named)
        self._padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x, attention_mask=(x != self._padding).long(), **self._constant).logits
        return scores


def _accepted(module: nn.Module) -> set[str]:
    """The arguments of a module's forward."""
    return set(inspect.signature(type(module).forward).parameters)

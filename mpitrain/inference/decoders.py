"""The scores of the next token, for a batch of texts that grow together, of every kind of model.

    CachedBlocks       blocks that remember (see `remembering`): each position is computed once
    RecomputedBlocks   any other model: the whole texts, each time
    Transformers       a model of the transformers library, with the cache that it brings along

All texts of a batch have one length. None of them is padded, so that models need no mask for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.errors import InputError, refusal
from mpitrain.models.earlier import POSITIONS, State
from mpitrain.models.hugging_face.families import CACHE_NAMES

# -- What blocks have to remember of earlier positions, keys and values in attention, while a text grows


_ROOM = 64  # positions that there is room for at first


class StateCache:
    """The states of one block, kept as one state.

    Its tensors have more room than they use, and double it when it is full: a position is written once.

    Args:
        notes: The same for all blocks of a model: what they share, the last of it.
    """

    def __init__(self, notes: dict[tuple[Hashable, ...], torch.Tensor]) -> None:
        self._memory: list[torch.Tensor] = []
        self._notes = notes
        self.length = 0

    def past(self) -> list[State]:
        """What the block's `forward_slice` is given: the state of all positions so far, if there are any."""
        return [tuple(t.narrow(POSITIONS, 0, self.length) for t in self._memory)] if self.length else []

    def add(self, state: State) -> State:
        """Add the state of the positions that come next; gives that of all, as views."""
        begin, own = self.length, state[0].shape[POSITIONS]
        end = begin + own
        if not self._memory or end > self._memory[0].shape[POSITIONS]:
            room = max(_ROOM, 2 * end)
            grown = [t.new_empty((*t.shape[:POSITIONS], room, *t.shape[POSITIONS + 1 :])) for t in state]
            for new, old in zip(grown, self._memory, strict=False):
                new.narrow(POSITIONS, 0, begin).copy_(old.narrow(POSITIONS, 0, begin))
            self._memory = grown
        for kept, t in zip(self._memory, state, strict=True):
            kept.narrow(POSITIONS, begin, own).copy_(t)
        self.length = end
        return self.past()[0]

    def shared(self, make: Callable[..., torch.Tensor], *of: Hashable) -> torch.Tensor:
        """What `make(*of)` gives, made once while blocks ask for the same."""
        key = (make, *of)
        if key not in self._notes:
            self._notes.clear()
            self._notes[key] = make(*of)
        return self._notes[key]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows of the batch."""
        if self._memory:
            chosen = torch.tensor(rows, device=self._memory[0].device)
            self._memory = [t.index_select(0, chosen) for t in self._memory]


Blocks = Sequence[tuple[str, nn.Module]]
Through = Callable[[Any, Callable[[Any], Any]], Any]  # see `Decoder.through`


def alone(x: Any, stage: Callable[[Any], Any]) -> Any:
    """The output of a model that one rank has all of."""
    return stage(x)


class Decoder(ABC):
    """Gives the scores of the next tokens; collective over the ranks that have the model between them.

    Args:
        through: Takes (tokens, what this rank's part of the model makes of its input) through the whole model; gives
            its output, or None on ranks that do not have its end.
    """

    def __init__(self, through: Through = alone) -> None:
        self.through = through

    @abstractmethod
    def begin(self) -> None:
        """Forget the batch before."""

    @abstractmethod
    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Let the texts go on.

        Args:
            tokens: What comes next in each of them, int64 [rows, positions].

        Returns:
            The scores [rows, vocabulary] of what comes after that; None on ranks that do not have the model's end.
        """

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the texts alone."""


class CachedBlocks(Decoder):
    """A model whose blocks remember earlier positions where they look at them.

    Args:
        blocks: Those of this rank, in order.
        last: The name of the model's last block that looks back: after it one position is enough.
    """

    def __init__(self, blocks: Blocks, last: str, through: Through = alone) -> None:
        super().__init__(through)
        self._blocks, self._last = list(blocks), last
        self._ways = {name: way for name, block in self._blocks if (way := remembering(block)) is not None}
        self.begin()

    def begin(self) -> None:
        notes: dict[Any, torch.Tensor] = {}
        self._caches = {name: StateCache(notes) for name in self._ways}

    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return last_scores(self.through(tokens, self._run))

    def _run(self, x: Any) -> Any:
        for name, block in self._blocks:
            cache = self._caches.get(name)
            if cache is None:
                x = block(x)
                continue
            x = self._ways[name](x, cache)
            if name == self._last and isinstance(x, torch.Tensor):
                x = x[:, -1:]
        return x

    def select(self, rows: Sequence[int]) -> None:
        for cache in self._caches.values():
            cache.select(rows)


def remembering(block: nn.Module) -> Callable[[Any, StateCache], Any] | None:
    """The output of a block that looks back, of (x, cache), to which it adds its state; None of another block."""
    cached, look_back = getattr(block, "forward_cached", None), getattr(block, "forward_slice", None)
    if cached is not None or look_back is None:
        return cached

    def forward_cached(x: Any, cache: StateCache) -> Any:
        x, state = look_back(x, cache.past())
        cache.add(state)
        return x

    return forward_cached


class RecomputedBlocks(Decoder):
    """A model that knows whole texts only. blocks: those of this rank, in order."""

    def __init__(self, blocks: Blocks, through: Through = alone) -> None:
        super().__init__(through)
        self._blocks = list(blocks)
        self.begin()

    def begin(self) -> None:
        self._tokens: torch.Tensor | None = None

    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        self._tokens = tokens if self._tokens is None else torch.cat([self._tokens, tokens], 1)
        return last_scores(self.through(self._tokens, self._run))

    def _run(self, x: Any) -> Any:
        for _, block in self._blocks:
            x = block(x)
        return x

    def select(self, rows: Sequence[int]) -> None:
        assert self._tokens is not None
        self._tokens = self._tokens[torch.tensor(rows, device=self._tokens.device)]


class Transformers(Decoder):
    """A model of the transformers library, which takes its cache under the name under which it returns it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self.begin()

    def begin(self) -> None:
        self._past: dict[str, Any] = {}

    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        out = self._model(input_ids=tokens, use_cache=True, **self._past)
        name = next((name for name in CACHE_NAMES if name in out), None)
        if name is None:
            raise InputError(f"{type(self._model).__name__} returns no cache, without which its texts cannot go on")
        self._past = {name: out[name]}
        return last_scores(out.logits)

    def select(self, rows: Sequence[int]) -> None:
        for past in self._past.values():
            past.batch_select_indices(torch.tensor(rows))


def of_transformers(module: nn.Module) -> Any:
    """The model of the transformers library that a module is or stands for, if it can keep a cache; else None."""
    for found in (getattr(module, "inner", None), module):
        if callable(getattr(found, "prepare_inputs_for_generation", None)) and hasattr(found, "config"):
            return found
    return None


def longest_text(module: nn.Module) -> int | None:
    """The tokens of the longest text that a model has positions for; None where it knows no end."""
    table = getattr(getattr(module, "positions", None), "weight", None)
    if isinstance(table, torch.Tensor):
        return len(table)
    longest = getattr(getattr(of_transformers(module), "config", None), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def last_scores(output: Any) -> torch.Tensor | None:
    """The scores of the last position. Raises InputError for what are no scores of tokens."""
    if output is None:
        return None
    if not isinstance(output, torch.Tensor) or output.dim() != 3:
        told = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise refusal(
            f"the model gives {told} for tokens [batch, sequence]; generate needs scores [batch, sequence, vocabulary]"
        )
    return output[:, -1]


def require_text(kind: str, vocabulary: int | None) -> int:
    """The vocabulary of a model of text. Raises InputError for a model of anything else."""
    if kind != "tokens" or vocabulary is None:
        raise InputError(
            f"the model was trained on {kind}, not on text, and generate goes on from a text; use "
            "`python -m mpitrain.predict`"
        )
    return vocabulary

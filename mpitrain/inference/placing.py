"""A trained model that gives the scores of tokens, on one rank or divided over several as in training.

    whole model, new weights -> layers divided over mesh.layers -> stages over mesh.stages -> weights of what is left

Each rank reads its own part of the checkpoint. Prompts are divided over mesh.readers. The scores of the next token come
from a decoder, for a batch of texts that grow together, of every kind of model:

    CachedBlocks       blocks that remember (see `remembering`): each position is computed once
    RecomputedBlocks   any other model: the whole texts, each time
    Transformers       a model of the transformers library, with the cache that it brings along

All texts of a batch have one length. None of them is padded, so that models need no mask for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import InputError, refusal
from mpitrain.inference.commands import Job
from mpitrain.loading import SavedModel, fill, saved_in
from mpitrain.models.earlier import POSITIONS, State
from mpitrain.models.hugging_face import CACHE_NAMES
from mpitrain.parallel.dividing import ModelPart, in_order
from mpitrain.pipe.partition import check_slices, listed_blocks, parameter_costs, stage_bounds
from mpitrain.pipe.wire import OutputSpec, Wire, as_tuple

if TYPE_CHECKING:
    from mpitrain.layout.mesh import Mesh

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
            x = self._ways[name](x, self._caches[name]) if name in self._ways else block(x)
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


# -- the model of a run, on the ranks that have it between them


def settled_here(tokens: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The chosen tokens, where one rank chooses them."""
    assert tokens is not None
    return tokens


@dataclass(frozen=True)
class LanguageModel:
    """A trained model of text, as far as this rank has it.

    Attributes:
        saved: Where it comes from.
        decoder: Gives its scores.
        vocabulary: Tokens it was trained on.
        longest: Tokens of the longest text it has positions for; None for any.
        device: What this rank computes on.
        settle: Gives (the tokens that this rank chose, or None; how many there are) as they are to be, on all ranks
            that have the model between them.
        remark: Something that a person should know; else empty.
    """

    saved: SavedModel
    decoder: Decoder
    vocabulary: int
    longest: int | None
    device: torch.device
    settle: Callable[[torch.Tensor | None, int], torch.Tensor] = settled_here
    remark: str = ""

    @property
    def end(self) -> int | None:
        """The token that ends a document; None where none does."""
        return self.saved.description.document_end


def placed(path: Path, job: Job, device: torch.device, *, best: bool = False, trust: bool = False) -> LanguageModel:
    """The model of a run or a checkpoint. Collective over the job's ranks.

    Args:
        path: The run's folder, or the checkpoint's.
        job: The ranks that have the model between them; one process has all of it, and starts no MPI.
        device: What this rank computes on.
        best: Take the checkpoint that checkpoint.best keeps.
        trust: Run code that lies in the run's folder, where the run names it.
    """
    return job.first_whole(path, lambda folder: _loaded(folder, job, device, trust), best=best)


def _loaded(folder: Path, job: Job, device: torch.device, trust: bool) -> LanguageModel:
    """Load this rank's part of a checkpoint's model. Collective."""
    mesh = job.mesh
    saved = job.agreed(lambda: saved_in(folder, trust=trust))
    vocabulary = job.agreed(lambda: require_text(saved.description.kind, saved.description.vocabulary))
    module = job.agreed(saved.build).module.eval()
    longest, known = longest_text(module), of_transformers(module) if mesh is None else None
    last, remark = ("", "") if known is not None else _memories(module, vocabulary)
    blocks = _part_of(module, mesh, listed=bool(last))
    part, through, settle = module, alone, settled_here
    if mesh is not None:
        from mpitrain.pipe.pipeline import named_tree

        line = _Line(mesh, device, vocabulary)
        through, settle = line.through, line.settle
        part = module if blocks == [("", module)] else named_tree(blocks)
    del module
    job.agreed(lambda: fill(part, saved.folder, saved.manifest))
    part.to(device)
    decoder: Decoder = CachedBlocks(blocks, last, through) if last else RecomputedBlocks(blocks, through)
    if known is not None:
        decoder = Transformers(known)
    return LanguageModel(saved, decoder, vocabulary, longest, device, settle, remark)


def _part_of(module: nn.Module, mesh: Mesh | None, listed: bool) -> Blocks:
    """This rank's blocks of a model, as training divides it, or all of it as one. listed: as blocks in any case."""
    if mesh is None:
        return listed_blocks(module) if listed else [("", module)]
    part = ModelPart(module, ParallelSection())
    for axis in in_order(mesh.axes, blocks=False):
        axis.divide(part, mesh.over(axis.name))
    if not listed and mesh.stages.size == 1:
        return [("", part.module)]
    blocks = listed_blocks(part.module)
    bounds = stage_bounds(blocks, mesh.stages.size, costs=parameter_costs(blocks))
    return blocks[bounds[mesh.stages.rank] : bounds[mesh.stages.rank + 1]]


def _memories(module: nn.Module, vocabulary: int) -> tuple[str, str]:
    """How a model remembers earlier positions: the name of the last block that does, and a remark if none does.

    A model of one's own is tried, as before its sequences are sliced in training.
    """
    why = f"{type(module).__name__} has no blocks with forward_slice"
    try:
        blocks = listed_blocks(module)
    except InputError:
        blocks = []
    looking = [name for name, block in blocks if remembering(block)]
    if looking and not type(module).__module__.startswith("mpitrain.models."):
        tokens = torch.arange(8)[None] % vocabulary
        try:
            check_slices(blocks, tokens, tokens, 2)
        except InputError as error:
            looking, why = [], str(error)
    remark = "" if looking else f"{why}, so the whole text is computed again for each token"
    return looking[-1] if looking else "", remark


class _Line:
    """The ranks that have one model between them: what goes from stage to stage, and what all of them have to know."""

    def __init__(self, mesh: Mesh, device: torch.device, vocabulary: int) -> None:
        self._stages, self._parts, self._vocabulary = mesh.stages, mesh.layers, vocabulary
        self._wire = Wire(mesh.stages)
        self._wire.device = device
        self._ends = mesh.stages.rank == mesh.stages.size - 1
        self._widths: list[int] | None = None  # scores that each tensor rank has, asked once

    def through(self, x: Any, stage: Callable[[Any], Any]) -> Any:
        """See `Decoder.through`."""
        comm, wire = self._stages, self._wire
        if comm.rank > 0:
            spec = wire.receive_header(comm.rank - 1)
            tensors, works = wire.receive(spec.tensors, comm.rank - 1, False)
            for work in works:
                wire.wait(work)
            x = tensors[0] if spec.single else tuple(tensors)
        x = stage(x)
        if self._ends:
            return self._whole(x)
        wire.finish()  # of the position before
        wire.send_header(OutputSpec.of(x), comm.rank + 1)
        wire.send(list(as_tuple(x)), comm.rank + 1, False)
        return None

    def _whole(self, scores: Any) -> Any:
        """All scores of the last position, where tensor ranks have parts of them."""
        if not isinstance(scores, torch.Tensor) or scores.dim() != 3:
            return scores
        scores = scores[:, -1:].contiguous()
        if self._widths is None:
            self._widths = self._parts.all_gather_object(scores.shape[-1])
        if max(self._widths) >= self._vocabulary:
            return scores
        counts, rows = self._widths, len(scores)
        flat = scores.new_empty(rows * sum(counts))
        self._parts.all_gather(flat, scores.view(-1), counts=[rows * count for count in counts])
        parts = flat.split([rows * count for count in counts])
        return torch.cat([part.view(rows, 1, -1) for part in parts], 2)

    def settle(self, tokens: torch.Tensor | None, rows: int) -> torch.Tensor:
        """What the first tensor rank of the last stage chose, on all ranks that have the model between them."""
        found = torch.empty(rows, dtype=torch.int64) if tokens is None else tokens.contiguous()
        if self._ends:
            self._parts.broadcast(found, 0)
        self._stages.broadcast(found, self._stages.size - 1)
        self._wire.finish()
        return found

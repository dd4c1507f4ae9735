"""Trained language model that scores next tokens, on one rank or divided over several ranks as in training.

    whole model, new weights -> layers divided over mesh.layers -> stages over mesh.stages -> this rank's weights loaded

Each rank reads its own part of the checkpoint. Prompts are divided over mesh.readers. A decoder computes the scores of
the next token for a batch of texts that grow together. There is one decoder for each kind of model:

    CachedBlocks       blocks with a cache (see `cached_forward`): each position is computed once
    RecomputedBlocks   any other model: the whole texts are computed each time
    Transformers       a model of the transformers library, with its own cache

All texts of a batch have equal length. Nothing is padded, so models need no attention mask.
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
from mpitrain.loading import SavedModel, fill, read_saved_model
from mpitrain.models.earlier import POSITIONS, State
from mpitrain.models.hugging_face import CACHE_NAMES
from mpitrain.parallel.dividing import ModelPart, in_order
from mpitrain.pipe.partition import check_slices, listed_blocks, parameter_costs, stage_bounds
from mpitrain.pipe.wire import OutputSpec, StageMessages, as_tuple

if TYPE_CHECKING:
    from mpitrain.layout.mesh import Mesh

# -- cache of the earlier positions that blocks use (keys and values in attention), while a text grows


_ROOM = 64  # initial room, in positions


class StateCache:
    """Cache of one block's states of all positions so far.

    Its tensors have spare room and double in size when full, so each position is written once.

    Args:
        notes: Tensors that all blocks of a model share through `shared`; one dictionary for all caches of the model.

    Attributes:
        length: Number of positions in the cache.
    """

    def __init__(self, notes: dict[tuple[Hashable, ...], torch.Tensor]) -> None:
        self._memory: list[torch.Tensor] = []
        self._notes = notes
        self.length = 0

    def past(self) -> list[State]:
        """Return the `past` argument of the block's `forward_slice`.

        It is a list with one state, that of all positions so far; empty before the first.
        """
        return [tuple(t.narrow(POSITIONS, 0, self.length) for t in self._memory)] if self.length else []

    def add(self, state: State) -> State:
        """Append the state of the next positions, and return the state of all positions as views."""
        begin, count = self.length, state[0].shape[POSITIONS]
        end = begin + count
        if not self._memory or end > self._memory[0].shape[POSITIONS]:
            room = max(_ROOM, 2 * end)
            grown = [t.new_empty((*t.shape[:POSITIONS], room, *t.shape[POSITIONS + 1 :])) for t in state]
            for new, old in zip(grown, self._memory, strict=False):
                new.narrow(POSITIONS, 0, begin).copy_(old.narrow(POSITIONS, 0, begin))
            self._memory = grown
        for memory, t in zip(self._memory, state, strict=True):
            memory.narrow(POSITIONS, begin, count).copy_(t)
        self.length = end
        return self.past()[0]

    def shared(self, make: Callable[..., torch.Tensor], *of: Hashable) -> torch.Tensor:
        """Return `make(*of)`. The last result is cached, so consecutive blocks with equal calls share it.

        Args:
            make: Function that computes a tensor.
            of: Arguments of the function.
        """
        key = (make, *of)
        if key not in self._notes:
            self._notes.clear()
            self._notes[key] = make(*of)
        return self._notes[key]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        if self._memory:
            chosen = torch.tensor(rows)  # ends of documents are on the CPU, keys and values may be on a device
            self._memory = [t.index_select(0, chosen.to(t.device)) for t in self._memory]


Blocks = Sequence[tuple[str, nn.Module]]
RunModel = Callable[[Any, Callable[[Any], Any]], Any]  # see `Decoder.run_model`


def run_whole(x: Any, stage: Callable[[Any], Any]) -> Any:
    """Return the output of a model that is entirely on one rank.

    Args:
        x: Input of the model.
        stage: Function that runs the model.
    """
    return stage(x)


class Decoder(ABC):
    """Source of the scores of next tokens. Its methods are collective over the ranks that share the model.

    Args:
        run_model: Function of (tokens, stage), where `stage` runs this rank's part of the model. It passes the tokens
            through the whole model and returns the output, or None on ranks without the model's end.
    """

    def __init__(self, run_model: RunModel = run_whole) -> None:
        self.run_model = run_model

    @abstractmethod
    def begin(self) -> None:
        """Discard the previous batch."""

    @abstractmethod
    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Append tokens to the texts, and return the scores of the next token.

        Args:
            tokens: Next tokens of each text, int64 [rows, positions].

        Returns:
            Scores of the token after these, [rows, vocabulary]; None on ranks without the model's end.
        """

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Continue with only these rows of the batch."""


class CachedBlocks(Decoder):
    """Decoder of a model whose blocks cache the earlier positions that they use.

    Args:
        blocks: Named blocks of this rank, in order.
        last: Name of the model's last block that uses earlier positions. Blocks after it get only the last position.
        run_model: Function that passes tokens through the whole model, as in `Decoder`.
    """

    def __init__(self, blocks: Blocks, last: str, run_model: RunModel = run_whole) -> None:
        super().__init__(run_model)
        self._blocks, self._last = list(blocks), last
        self._forwards = {name: way for name, block in self._blocks if (way := cached_forward(block)) is not None}
        self.begin()

    def begin(self) -> None:
        notes: dict[Any, torch.Tensor] = {}
        self._caches = {name: StateCache(notes) for name in self._forwards}

    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return last_scores(self.run_model(tokens, self._run))

    def _run(self, x: Any) -> Any:
        for name, block in self._blocks:
            x = self._forwards[name](x, self._caches[name]) if name in self._forwards else block(x)
            if name == self._last and isinstance(x, torch.Tensor):
                x = x[:, -1:]
        return x

    def select(self, rows: Sequence[int]) -> None:
        for cache in self._caches.values():
            cache.select(rows)


def cached_forward(block: nn.Module) -> Callable[[Any, StateCache], Any] | None:
    """Return the function that runs a block with a cache; None for a block that does not use earlier positions.

    The function takes (x, cache), returns the block's output and adds its state to the cache.
    """
    cached, look_back = getattr(block, "forward_cached", None), getattr(block, "forward_slice", None)
    if cached is not None or look_back is None:
        return cached

    def forward_cached(x: Any, cache: StateCache) -> Any:
        x, state = look_back(x, cache.past())
        cache.add(state)
        return x

    return forward_cached


class RecomputedBlocks(Decoder):
    """Decoder of a model without a cache: it computes the whole texts each time.

    Args:
        blocks: Named blocks of this rank, in order.
        run_model: Function that passes tokens through the whole model, as in `Decoder`.
    """

    def __init__(self, blocks: Blocks, run_model: RunModel = run_whole) -> None:
        super().__init__(run_model)
        self._blocks = list(blocks)
        self.begin()

    def begin(self) -> None:
        self._tokens: torch.Tensor | None = None

    def advance(self, tokens: torch.Tensor) -> torch.Tensor | None:
        self._tokens = tokens if self._tokens is None else torch.cat([self._tokens, tokens], 1)
        return last_scores(self.run_model(self._tokens, self._run))

    def _run(self, x: Any) -> Any:
        for _, block in self._blocks:
            x = block(x)
        return x

    def select(self, rows: Sequence[int]) -> None:
        assert self._tokens is not None
        self._tokens = self._tokens[torch.tensor(rows, device=self._tokens.device)]


class Transformers(Decoder):
    """Decoder of a model of the transformers library, with the model's own cache.

    The model must accept its cache under the name under which it returns it.

    Args:
        model: Model of the transformers library.
    """

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
            raise InputError(f"{type(self._model).__name__} returns no cache, which generate needs; use another")
        self._past = {name: out[name]}
        return last_scores(out.logits)

    def select(self, rows: Sequence[int]) -> None:
        for past in self._past.values():
            past.batch_select_indices(torch.tensor(rows))


def transformers_model(module: nn.Module) -> Any:
    """Return the model of the transformers library that a module is or wraps; None unless it can use a cache."""
    for candidate in (getattr(module, "inner", None), module):
        if callable(getattr(candidate, "prepare_inputs_for_generation", None)) and hasattr(candidate, "config"):
            return candidate
    return None


def longest_text(module: nn.Module) -> int | None:
    """Return the number of tokens of the longest text that a model has positions for; None if there is no limit."""
    table = getattr(getattr(module, "positions", None), "weight", None)
    if isinstance(table, torch.Tensor):
        return len(table)
    longest = getattr(getattr(transformers_model(module), "config", None), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def last_scores(output: Any) -> torch.Tensor | None:
    """Return the scores of the last position; None for None.

    Raises:
        InputError: The output is not a tensor [batch, sequence, vocabulary].
    """
    if output is None:
        return None
    if not isinstance(output, torch.Tensor) or output.dim() != 3:
        form = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise refusal(
            f"the model returns {form} for tokens [batch, sequence]; generate needs scores [batch, "
            "sequence, vocabulary]"
        )
    return output[:, -1]


def require_text(kind: str, vocabulary: int | None) -> int:
    """Return the vocabulary size of a language model.

    Args:
        kind: Kind of the data that the model was trained on.
        vocabulary: Vocabulary size of that data; None if it has none.

    Raises:
        InputError: The model was not trained on text.
    """
    if kind != "tokens" or vocabulary is None:
        raise InputError(
            f"the model was trained on {kind}, not on text, but generate continues text; use "
            "`python -m mpitrain.predict`"
        )
    return vocabulary


# -- the model of a run, on the ranks that share it


def on_single_rank(tokens: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return the chosen tokens, if a single rank has the whole model.

    Args:
        tokens: Tokens that this rank chose.
        rows: Number of tokens; not used.
    """
    assert tokens is not None
    return tokens


@dataclass(frozen=True)
class LanguageModel:
    """Trained language model, or this rank's part of it.

    Attributes:
        saved: Checkpoint that it was loaded from.
        decoder: Decoder that computes its scores.
        vocabulary: Number of tokens it was trained on.
        longest: Number of tokens of the longest text it has positions for; None for no limit.
        device: Device that this rank computes on.
        share_tokens: Function of (tokens, rows) that returns the chosen tokens on all ranks that share the model.
            `tokens` are those that this rank chose, or None; `rows` is their number.
        remark: Remark for the user; empty for none.
    """

    saved: SavedModel
    decoder: Decoder
    vocabulary: int
    longest: int | None
    device: torch.device
    share_tokens: Callable[[torch.Tensor | None, int], torch.Tensor] = on_single_rank
    remark: str = ""

    @property
    def end(self) -> int | None:
        """Token that ends a document; None if there is none."""
        return self.saved.description.document_end


def load_language_model(
    path: Path, job: Job, device: torch.device, *, best: bool = False, trust: bool = False
) -> LanguageModel:
    """Load the language model of a run or a checkpoint. Collective over the job's ranks.

    Args:
        path: Folder of the run or of the checkpoint.
        job: Ranks that share the model. A single process has all of it, and does not start MPI.
        device: Device that this rank computes on.
        best: If true, take the checkpoint kept by checkpoint.best instead of the newest.
        trust: If true, run code in the run's folder if the run needs it.

    Raises:
        InputError: The model was not trained on text.
    """
    return job.first_complete(path, lambda folder: _load(folder, job, device, trust), best=best)


def _load(folder: Path, job: Job, device: torch.device, trust: bool) -> LanguageModel:
    """Load this rank's part of a checkpoint's model. Collective."""
    mesh = job.mesh
    saved = job.run_agreed(lambda: read_saved_model(folder, trust=trust))
    vocabulary = job.run_agreed(lambda: require_text(saved.description.kind, saved.description.vocabulary))
    module = job.run_agreed(saved.build).module.eval()
    longest, known = longest_text(module), transformers_model(module) if mesh is None else None
    last, remark = ("", "") if known is not None else _last_cached_block(module, vocabulary)
    blocks = _local_blocks(module, mesh, listed=bool(last))
    part, run_model, share_tokens = module, run_whole, on_single_rank
    if mesh is not None:
        from mpitrain.pipe.pipeline import named_tree

        line = _ModelRanks(mesh, device, vocabulary)
        run_model, share_tokens = line.run_model, line.share_tokens
        part = module if blocks == [("", module)] else named_tree(blocks)
    del module
    job.run_agreed(lambda: fill(part, saved.folder, saved.manifest))
    part.to(device)
    decoder: Decoder = CachedBlocks(blocks, last, run_model) if last else RecomputedBlocks(blocks, run_model)
    if known is not None:
        decoder = Transformers(known)
    return LanguageModel(saved, decoder, vocabulary, longest, device, share_tokens, remark)


def _local_blocks(module: nn.Module, mesh: Mesh | None, listed: bool) -> Blocks:
    """Return this rank's blocks of a model, divided as in training, or the whole model as one block.

    Args:
        module: Whole model.
        mesh: Mesh of the ranks that share the model; None for a single process.
        listed: If true, always return the model's own blocks.
    """
    if mesh is None:
        return listed_blocks(module) if listed else [("", module)]
    part = ModelPart(module, ParallelSection())
    for axis in in_order(mesh.axes, blocks=False):
        axis.divide(part, mesh.over(axis.name))
    if not listed and mesh.stages.size == 1:
        return [("", part.module)]
    blocks = listed_blocks(part.module)
    bounds = stage_bounds(blocks, mesh.stages.size, costs=[parameter_costs(blocks)] * mesh.stages.size)
    return blocks[bounds[mesh.stages.rank] : bounds[mesh.stages.rank + 1]]


def _last_cached_block(module: nn.Module, vocabulary: int) -> tuple[str, str]:
    """Return the name of the last block that uses earlier positions, and a remark if no block can.

    A user's own model is checked first, as training does before it slices sequences.
    """
    why = f"{type(module).__name__} has no blocks with forward_slice"
    try:
        blocks = listed_blocks(module)
    except InputError:
        blocks = []
    cached = [name for name, block in blocks if cached_forward(block)]
    if cached and not type(module).__module__.startswith("mpitrain.models."):
        tokens = torch.arange(8)[None] % vocabulary
        try:
            check_slices(blocks, tokens, tokens, 2)
        except InputError as error:
            cached, why = [], str(error)
    remark = "" if cached else f"{why}, so the whole text is computed again for each token"
    return cached[-1] if cached else "", remark


class _ModelRanks:
    """Ranks that share one model, and the messages between them: outputs between stages, and chosen tokens."""

    def __init__(self, mesh: Mesh, device: torch.device, vocabulary: int) -> None:
        self._stages, self._parts, self._vocabulary = mesh.stages, mesh.layers, vocabulary
        self._messages = StageMessages(mesh.stages)
        self._messages.device = device
        self._ends = mesh.stages.rank == mesh.stages.size - 1
        self._widths: list[int] | None = None  # number of scores on each tensor rank, gathered once

    def run_model(self, x: Any, stage: Callable[[Any], Any]) -> Any:
        """Pass x through the whole model, and return the output or None, as `Decoder` describes `run_model`.

        Args:
            x: Input of the model, used on the first stage.
            stage: Function that runs this rank's part of the model.
        """
        comm, messages = self._stages, self._messages
        if comm.rank > 0:
            spec = messages.receive_header(comm.rank - 1)
            tensors, works = messages.receive(spec.tensors, comm.rank - 1, False)
            for work in works:
                work.wait()
            x = tensors[0] if spec.single else tuple(tensors)
        x = stage(x)
        if self._ends:
            return self._gather_scores(x)
        messages.finish()  # sends of the previous position
        messages.send_header(OutputSpec.of(x), comm.rank + 1)
        messages.send(list(as_tuple(x)), comm.rank + 1, False)
        return None

    def _gather_scores(self, scores: Any) -> Any:
        """Return all scores of the last position, gathered if tensor ranks have parts of them."""
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

    def share_tokens(self, tokens: torch.Tensor | None, rows: int) -> torch.Tensor:
        """Return the tokens chosen by the first tensor rank of the last stage, on all ranks of the model. Collective.

        Args:
            tokens: Tokens that this rank chose; None on ranks without scores.
            rows: Number of tokens.
        """
        result = torch.empty(rows, dtype=torch.int64) if tokens is None else tokens.contiguous()
        if self._ends:
            self._parts.broadcast(result, 0)
        self._stages.broadcast(result, self._stages.size - 1)
        self._messages.finish()
        return result

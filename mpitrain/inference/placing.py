"""A trained model that gives the scores of tokens, on one rank or divided over several as in training.

    whole model, new weights -> layers divided over mesh.tensor -> stages over mesh.pipeline -> weights of what is left

Each rank reads its own part of the checkpoint. Prompts are divided over mesh.data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpitrain.errors import InputError
from mpitrain.inference.commands import Job
from mpitrain.inference.decoders import (
    Blocks,
    CachedBlocks,
    Decoder,
    RecomputedBlocks,
    Transformers,
    alone,
    longest_text,
    of_transformers,
    remembering,
    require_text,
)
from mpitrain.loading import SavedModel, saved_in
from mpitrain.pipe.partition import check_slices, listed_blocks, parameter_costs, stage_bounds
from mpitrain.pipe.wire import OutputSpec, Wire, as_tuple
from mpitrain.tensor import parallelize, plan_for

if TYPE_CHECKING:
    from mpitrain.mesh import Mesh

Settle = Callable[["torch.Tensor | None", int], torch.Tensor]  # see `LanguageModel.settle`
_OURS = "mpitrain.models."  # modules whose blocks need no trial


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
    settle: Settle = settled_here
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
    job.agreed(lambda: saved.fill(part))
    part.to(device)
    decoder: Decoder
    if known is not None:
        decoder = Transformers(known)
    else:
        decoder = CachedBlocks(blocks, last, through) if last else RecomputedBlocks(blocks, through)
    return LanguageModel(saved, decoder, vocabulary, longest, device, settle, remark)


def _part_of(module: nn.Module, mesh: Mesh | None, listed: bool) -> Blocks:
    """This rank's blocks of a model, as training divides it, or all of it as one. listed: as blocks in any case."""
    if mesh is not None and mesh.tensor.size > 1:
        parallelize(module, mesh.tensor, plan_for(module))
    staged = mesh is not None and mesh.pipeline.size > 1
    if not staged and not listed:
        return [("", module)]
    blocks = listed_blocks(module)
    if mesh is None:
        return blocks
    bounds = stage_bounds(blocks, mesh.pipeline.size, costs=parameter_costs(blocks))
    return blocks[bounds[mesh.pipeline.rank] : bounds[mesh.pipeline.rank + 1]]


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
    if looking and not type(module).__module__.startswith(_OURS):
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
        self._stages, self._parts, self._vocabulary = mesh.pipeline, mesh.tensor, vocabulary
        self._wire = Wire(mesh.pipeline)
        self._wire.device = device
        self._ends = mesh.pipeline.rank == mesh.pipeline.size - 1
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
        if self._parts.size == 1 or not isinstance(scores, torch.Tensor) or scores.dim() != 3:
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
        if self._ends and self._parts.size > 1:
            self._parts.broadcast(found, 0)
        if self._stages.size > 1:
            self._stages.broadcast(found, self._stages.size - 1)
            self._wire.finish()
        return found

"""A decoder-only transformer over bytes or tokens.

    tokens -> embedding (+ positions) -> dropout -> [ + attention(norm) -> + mlp(norm) ] x layers -> norm -> head
                  \\______________________________ one tensor, where tied ___________________________________/

Positions are rotary by default: they need no parameter beside the embedding in the first pipeline stage, no table that
ends at some length, and on the default data they learn faster.

The model knows no parallelism, but is laid out for it: the forward pass is its blocks in order, and the linear
layers to be split are listed (`tensor_plan`).

Weights come from torch's default generator: after the same `torch.manual_seed` they are the same on every rank.
"""

from __future__ import annotations

import math

from torch import nn

from mpitrain.models.gpt.block import Form, TransformerBlock
from mpitrain.models.gpt.positions import BeginPair, LearnedPositions, OnStream
from mpitrain.models.losses import cross_entropy
from mpitrain.models.task import BlockModel

INIT_STD = 0.02  # GPT-2


class GPT(BlockModel):
    """tokens [batch, sequence], int64 or int32 -> scores [batch, sequence, vocabulary].

    The score at a position depends on that token and earlier ones only. width must be a multiple of heads, heads one
    of form.kv_heads, and width / heads even; any sequence length works, with learned positions up to max_positions.

    Args:
        vocabulary: Tokens.
        layers: Blocks.
        width: Features of a token.
        heads: Of attention.
        dropout: Its probability.
        tied: The head has the embedding's weight.
        max_positions: Rows of the table of learned positions.
        form: What the blocks are made of.
        apart: The token that ends a document; attention then stays inside of documents, whose tokens are scored as if
            each were a sequence of its own. Between blocks go pairs then (see `documents`).
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        tied: bool = True,
        max_positions: int = 0,
        form: Form = Form(),
        apart: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = LearnedPositions(max_positions, width) if form.positions == "learned" else None
        self.dropout: nn.Module = nn.Dropout(dropout)
        ends = None if apart is None else layers - 1  # the block after which ends of documents are dropped
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, dropout, form, last=index == ends) for index in range(layers)
        )
        self.norm, self._qk_norm = form.make_norm(width), form.qk_norm
        # of a tied head its own weight is never used
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta" if tied else None)
        self._initialise(layers)
        if tied:
            self.head.weight = self.embedding.weight
        if apart is not None:
            self.embedding.register_forward_hook(BeginPair(apart))
            self.dropout = OnStream(self.dropout)
        self.criterion = cross_entropy

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in order; feeding tokens through them equals `model(tokens)`."""
        blocks = [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]
        begin: list[tuple[str, nn.Module]] = [("embedding", self.embedding)]
        if self.positions is not None:
            begin.append(("positions", self.positions))
        return [*begin, ("dropout", self.dropout), *blocks, ("norm", self.norm), ("head", self.head)]

    def tensor_plan(self) -> dict[str, str]:
        """How each layer may be divided over ranks. `criterion` then has to take divided scores."""
        plan = {
            "embedding": "vocabulary",
            "blocks.*.attention.qkv": "column",
            "blocks.*.attention.out": "row",
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.down": "row",
            "head": "vocabulary",
        }
        if hasattr(self.blocks[0].mlp, "gate"):
            plan["blocks.*.mlp.gate"] = "column"
        if self._qk_norm:
            plan |= {"blocks.*.attention.q_norm": "heads", "blocks.*.attention.k_norm": "heads"}
        if self.positions is not None:
            plan["positions"] = "scatter"  # the table is added to whole sequences
        return plan

    def _initialise(self, layers: int) -> None:
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        for block in self.blocks:
            # each layer adds to the residual stream twice: scaled so that its variance stays put with depth
            into_residual = INIT_STD / math.sqrt(2 * layers)
            for name, linear in block.named_modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=into_residual if name.endswith(("out", "down")) else INIT_STD)
                    if linear.bias is not None:
                        nn.init.zeros_(linear.bias)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=INIT_STD)
        if not self.head.weight.is_meta:
            nn.init.normal_(self.head.weight, std=INIT_STD)

"""What a block is made of, apart from its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

ROTARY_BASE = 10000.0
_MULTIPLE = 64  # features, of a derived width of a SwiGLU


@dataclass(frozen=True)
class Form:
    """The choices in which transformer blocks differ. The defaults are GPT-2's, with rotary positions.

    Attributes:
        norm: layernorm, or rmsnorm (Zhang and Sennrich 2019).
        norm_eps: What a norm adds to the variance.
        positions: rotary (Su et al. 2021), or learned: a table beside the embedding.
        rope_base: Of rotary positions, the base of the wavelengths.
        mlp: gelu (its tanh form), or swiglu (Shazeer 2020).
        hidden: Features inside the MLP; 0: see `hidden_features`.
        kv_heads: Heads of keys and values, which as many query heads each share (Ainslie et al. 2023); 0: as heads.
        bias: Whether linear layers and LayerNorms have one.
        qkv_bias: Whether the layer of queries, keys and values has one, though the others have none (Qwen2's).
        qk_norm: Whether the queries and the keys of each head are normed, by RMSNorm, before they are turned (Qwen3's).
    """

    norm: str = "layernorm"
    norm_eps: float = 1e-5
    positions: str = "rotary"
    rope_base: float = ROTARY_BASE
    mlp: str = "gelu"
    hidden: int = 0
    kv_heads: int = 0
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def make_norm(self, width: int) -> nn.Module:
        """A norm over the features of a token."""
        if self.norm == "rmsnorm":
            return nn.RMSNorm(width, eps=self.norm_eps)
        return nn.LayerNorm(width, eps=self.norm_eps, bias=self.bias)

    def make_qk_norm(self, head_dim: int) -> nn.Module | None:
        """A norm over the features of a head; None where there is none."""
        return nn.RMSNorm(head_dim, eps=self.norm_eps) if self.qk_norm else None

    def hidden_features(self, width: int) -> int:
        """Features inside the MLP: four times the width, or for a SwiGLU, which has a third matrix, as many numbers."""
        if self.hidden:
            return self.hidden
        return -(-8 * width // (3 * _MULTIPLE)) * _MULTIPLE if self.mlp == "swiglu" else 4 * width

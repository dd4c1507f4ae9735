"""Compression of tensors before they are reduced: none, or 16-bit floating point."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface of a compression; scripts may derive their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a received tensor in its original form.

        Args:
            tensor: Received tensor.
            ctx: Second value that `compress` has returned.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors are sent in 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in 16 bits if it is a floating-point tensor, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(ctx)


class Compressions:
    """Compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor

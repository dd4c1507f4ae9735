"""Expected results of collectives, computed on one process."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
TOLERANCE = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float32: 1e-6,
    torch.float64: 1e-13,
    torch.complex64: 1e-6,
    torch.complex128: 1e-13,
}


def values(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return the contribution of a rank, which differs between ranks and between elements."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) > 0.4
    if dtype in INTEGERS:
        return torch.randint(0, 4, (numel,), generator=generator).to(dtype)
    parts = torch.rand(2, numel, generator=generator, dtype=torch.float64) + 0.5
    return (torch.complex(parts[0], parts[1]) if dtype in COMPLEX else parts[0]).to(dtype)


def expected_reduction(op: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    dtype = contributions[0].dtype
    stacked = torch.stack(contributions)
    if dtype == torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    wide = stacked.to(_wide(dtype))
    if op == "avg" and dtype in INTEGERS:
        return torch.div(wide.sum(0), len(contributions), rounding_mode="trunc").to(dtype)
    result = {"sum": wide.sum, "avg": wide.mean, "product": wide.prod}.get(op)
    return (result(0) if result else getattr(wide, "a" + op)(0)).to(dtype)


def is_defined(op: str, dtype: torch.dtype) -> bool:
    if op == "avg":
        return dtype != torch.bool
    return op not in ("min", "max") or dtype not in COMPLEX


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, ranks: int = 1) -> None:
    """Assert that integers are equal, and that floating-point numbers agree up to a few roundings."""
    tolerance = TOLERANCE.get(actual.dtype, 0.0) * ranks
    actual, wide = actual.cpu(), _wide(actual.dtype)
    torch.testing.assert_close(actual.to(wide), expected.to(wide), rtol=tolerance, atol=0.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype in COMPLEX else torch.float64 if dtype in FLOATS else torch.int64

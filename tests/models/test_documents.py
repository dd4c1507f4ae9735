"""Attention within documents: parity with the dense formula, and work and memory by the lengths of documents."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpitrain.inference.placing import CachedBlocks
from mpitrain.models.documents import attend_within_documents, cut_into_pieces, document_mask
from mpitrain.models.gpt import GPT
from mpitrain.planner.counted import OperationRecorder

END = 5
TOKENS = 300
BORDERS = {  # tokens up to each end of a document, for each sample
    "uneven": [[3, 120, 121, 250], [90, 95, 299]],
    "a document of one token": [[1, 100, 101], [150, 151]],
    "an end at the last token": [[70, 300], [300]],
    "a single document": [[300], [300]],
    "no end": [[], []],
    "equal documents": [[100, 200, 300], [100, 200, 300]],
    "tiny documents": [list(range(2, 290, 3)), list(range(1, 301))],
    "three samples": [[], [64, 128, 129], [65, 129]],
}


def make_ends(borders: list[list[int]], tokens: int = TOKENS) -> torch.Tensor:
    ends = torch.zeros(len(borders), tokens, dtype=torch.uint8)
    for row, places in zip(ends, borders, strict=True):
        row[[place - 1 for place in places]] = 1
    return ends


def make_qkv(samples: int, queries: int, tokens: int = TOKENS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(samples, 2, length, 8, requires_grad=True) for length in (queries, tokens, tokens)]


@pytest.mark.parametrize("earlier", [0, 1, 100, 298])
@pytest.mark.parametrize("kind", BORDERS)
def test_output_and_gradients_are_those_of_a_dense_mask(kind, earlier):
    ends = make_ends(BORDERS[kind])
    q, k, v = qkv = make_qkv(len(ends), TOKENS - earlier)
    dense = scaled_dot_product_attention(q, k, v, document_mask(ends.long(), TOKENS - earlier))
    factors = torch.randn_like(dense)
    mixed = attend_within_documents(q, k, v, ends, 0.0)
    torch.testing.assert_close(mixed, dense, rtol=1e-5, atol=1e-6)
    gradients, expected = (torch.autograd.grad((out * factors).sum(), qkv) for out in (mixed, dense))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=2e-6)


def test_equal_documents_are_one_call_and_short_neighbours_share_one():
    def sizes(ends, length=TOKENS):
        return [(each.queries, each.keys, each.skipped, each.number) for each in cut_into_pieces(ends, length)]

    assert sizes(make_ends(BORDERS["equal documents"])) == [(100, 100, 0, 6)]
    assert sizes(make_ends(BORDERS["no end"])) == [(300, 300, 0, 2)]
    assert len(sizes(make_ends([[*range(1, 301)]]))) == 5  # 64 tokens in each but the last
    assert sizes(make_ends([[100, 250]]).bfloat16(), 100) == [(50, 150, 100, 1), (50, 50, 0, 1)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_work_and_memory_do_not_grow_with_the_square_of_the_sequence(dropout):
    heads, head_dim, longest = 2, 8, 100
    most = []
    for tokens in (1024, 4096):
        borders = [*range(longest, tokens, longest), *range(tokens - 24, tokens)]
        q, k, v = make_qkv(1, tokens, tokens)
        with OperationRecorder() as recorder:
            out = attend_within_documents(q, k, v, make_ends([borders], tokens), dropout)
            forward = sum(each.flops for each in recorder.operations)
            out.sum().backward()
            both = sum(each.flops for each in recorder.operations)
            peak = recorder.peak(0, recorder.mark())
        lengths = [hi - lo for lo, hi in pairwise([0, *sorted({*borders, tokens})])]
        squares = sum(length**2 for length in lengths)
        assert forward == pytest.approx(4 * heads * head_dim * squares, rel=0.05)
        assert both <= 3.6 * forward
        most.append(peak / tokens)
    assert peak < tokens * tokens * heads  # bytes: even a mask of bytes for each head would take as many
    assert most[1] <= 1.1 * most[0]  # memory per token, for documents of the same length


def test_without_values_each_sample_counts_as_one_document():
    with FakeTensorMode():
        ends = torch.zeros(3, 200, dtype=torch.uint8)
        assert [piece[:3] for piece in cut_into_pieces(ends, 200)] == [(200, 200, 0)]
        with OperationRecorder() as recorder:
            attend_within_documents(*(torch.empty(3, 2, 200, 8) for _ in range(3)), ends, 0.0)
    assert sum(each.flops for each in recorder.operations) == 4 * 3 * 2 * 8 * 200**2


def packed_gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(23, 3, 16, 4, dropout, apart=END)


def test_dropout_is_the_same_when_recomputed():
    model, tokens = packed_gpt(dropout=0.3), torch.randint(23, (2, 200), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(2)
        x = tokens
        for _, block in model.pipeline_blocks():
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        model.loss(x, tokens).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class _Reads(TorchDispatchMode):
    """Number of copies from a device into host memory; the host waits for each."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        read = func is torch.ops.aten._to_copy.default and args[0].device.type != "cpu" and out.device.type == "cpu"
        self.number += bool(read or func is torch.ops.aten._local_scalar_dense.default)
        return out


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_the_host_waits_for_a_device_once_in_a_pass(device):
    model, tokens = packed_gpt(), torch.randint(23, (2, 200), generator=torch.Generator().manual_seed(1))
    copied = copy.deepcopy(model).to(device)
    on_device = tokens.to(device)
    with sdpa_kernel(SDPBackend.MATH):
        with _Reads() as reads:
            loss = copied.loss(copied(on_device), on_device)
            loss.backward()
        model.loss(model(tokens), tokens).backward()
    assert reads.number == 1
    for p, expected in zip(copied.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_generation_on_a_device_stays_within_documents(device):
    model, tokens = packed_gpt().eval(), torch.randint(23, (2, 90), generator=torch.Generator().manual_seed(1))
    decoder = CachedBlocks(copy.deepcopy(model).to(device).pipeline_blocks(), "blocks.2")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for lo, hi in ((0, 80), (80, 81), (81, 90)):
            scores = decoder.advance(tokens[:, lo:hi].to(device))
            torch.testing.assert_close(scores.cpu(), model(tokens[:, :hi])[:, -1], rtol=1e-4, atol=1e-6)
            decoder.select([1, 0])
            tokens = tokens.flip(0)


def test_other_documents_do_not_compile_a_block_again():
    model, graphs = packed_gpt(), []
    compiled = copy.deepcopy(model)

    def backend(module, inputs):
        graphs.append(module)
        return module

    for block in compiled.blocks:
        block.compile(backend=backend)
    generator, numbers = torch.Generator().manual_seed(1), []
    for _ in range(4):
        tokens = torch.randint(23, (2, 200), generator=generator)
        torch.testing.assert_close(compiled(tokens), model(tokens))
        numbers.append(len(graphs))
    assert numbers[0] and len(set(numbers)) == 1

"""Every way of recomputing activations gives the bits of a run that keeps them, and keeps what it promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT
from mpitrain.models.resnet import ResNet
from mpitrain.parallel.recompute import recompute_blocks, segments
from mpitrain.pipe.stage import Stage

WAYS = [True, "selective", "every 2", "every 3", [0, 2]]


def gpt(dropout=0.2, layers=4, **options):
    torch.manual_seed(0)
    return GPT(17, layers, 16, 2, dropout=dropout, **options), torch.randint(17, (3, 12))


def resnet():
    model = ResNet(18, 4, 3, 5, nn.functional.cross_entropy, small=True)
    return model, torch.randn(4, 3, 8, 8)


def trained(make, recompute, precision=torch.float32):
    """Return the losses, gradients and buffers of three steps, and the evaluation loss."""
    torch.manual_seed(0)
    model, x = make()
    if recompute:
        recompute_blocks(model, recompute)
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        results += [loss.detach(), torch.rand(3), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    results += [model.eval()(x).detach(), *(b.clone() for b in model.buffers())]
    return results


@pytest.mark.parametrize("recompute", WAYS, ids=str)
@pytest.mark.parametrize("make", [gpt, resnet, lambda: gpt(apart=3)], ids=["gpt", "resnet", "documents"])
def test_losses_gradients_and_statistics_are_bitwise_those_of_a_run_that_keeps_activations(make, recompute):
    for one, other in zip(trained(make, recompute), trained(make, False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", ["selective", "every 2"])
def test_blocks_are_recomputed_in_the_precision_of_forward(recompute):
    recomputed, plain = trained(gpt, recompute, torch.bfloat16), trained(gpt, False, torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(recomputed, plain, strict=True))
    assert not torch.equal(plain[0], trained(gpt, False)[0])


class Products(TorchDispatchMode):
    """Counts calls of operations."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Alive(TorchDispatchMode):
    """Finds the memory that was allocated under it and is still in use."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for t in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(t, torch.Tensor) and t.numel():
                self.storages[t.untyped_storage().data_ptr()] = (
                    StorageWeakRef(t.untyped_storage()),
                    t.untyped_storage().nbytes(),
                )
        return results

    def nbytes(self):
        return sum(nbytes for storage, nbytes in self.storages.values() if not storage.expired())


def test_selective_keeps_the_bytes_of_the_formula():
    def alive(recompute):
        model, x = gpt(0.0)
        if recompute:
            recompute_blocks(model, recompute)
        with Alive() as memory:
            loss = model(x).square().mean()
        assert loss.requires_grad
        return memory.nbytes()

    tokens, width, heads, blocks = 3 * 12, 16, 2, 4
    # for each token: qkv, attention and its logsumexp, out, up and down; 4 bytes each
    assert alive("selective") - alive(True) == pytest.approx(4 * blocks * tokens * (10 * width + heads), rel=0.01)
    assert alive("every 2") < alive(True) < alive([1]) < alive(False) and alive("selective") < alive(False)


def counted(make, recompute):
    """Return how often each operation ran in one step, and the elements that autograd's graph keeps outside."""
    torch.manual_seed(0)
    model, x = make()
    if recompute:
        recompute_blocks(model, recompute)
    kept = []
    with Products() as products:
        with saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = model(x).square().mean()
        loss.backward()
    return products.counts, sum(kept)


@pytest.mark.parametrize(
    ("make", "kept", "again"),
    [
        (lambda: gpt(0.0), ["mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"], "gelu"),
        (resnet, ["convolution"], "native_batch_norm"),
    ],
    ids=["gpt", "resnet"],
)
def test_selective_repeats_neither_products_nor_attention(make, kept, again):
    plain, whole, selective = (counted(make, way)[0] for way in (False, True, "selective"))
    for name in kept:
        assert selective.get(name, 0) == plain.get(name, 0)
    assert any(whole.get(name, 0) > plain.get(name, 0) for name in kept)
    assert selective[again] > plain[again]


def test_a_segment_runs_each_block_once_more_and_keeps_one_input():
    plain, most = counted(lambda: gpt(0.0), False)
    kept = {}
    for way in (True, "every 2", "every 4", [1]):
        counts, kept[way if isinstance(way, str) else str(way)] = counted(lambda: gpt(0.0), way)
        blocks = 1 if way == [1] else 4
        assert counts["gelu"] == plain["gelu"] // 4 * (4 + blocks)
    inputs = 3 * 12 * 16
    assert kept["True"] - kept["every 2"] == 2 * inputs and kept["every 2"] - kept["every 4"] == inputs
    assert kept["True"] < kept["[1]"] < most


@pytest.mark.parametrize("recompute", ["selective", "every 2"])
@pytest.mark.parametrize("slices", [1, 3])
def test_stages_with_backward_in_halves_and_slices_recompute_their_blocks_once(recompute, slices):
    def run(recompute):
        model, _ = gpt(0.2 * (slices == 1), layers=6)
        blocks = list(model.blocks)
        if recompute:
            recompute_blocks(model, recompute)
        stage = Stage(blocks, first=False, recompute=False, halves=slices == 1)
        torch.manual_seed(2)
        passes, past = [], {} if slices > 1 else None
        counts = Products()
        with counts:
            for _ in range(slices):
                x = torch.randn(3, 4, 16, requires_grad=True)
                output, saved = stage.forward(x, past=past)
                passes.append((saved, [torch.randn_like(output)]))
            results = [torch.rand(2)]
            for saved, gradients in reversed(passes):
                results += stage.backward_input(saved, gradients) if slices == 1 else stage.backward(saved, gradients)
                stage.backward_weight(saved)
        return [*results, *(p.grad for block in blocks for p in block.parameters())], counts.counts

    (plain, once), (again, twice) = run(False), run(recompute)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert once["gelu"] == 6 * slices and twice["gelu"] == 2 * once["gelu"]


def test_only_blocks_called_with_the_output_before_share_a_segment():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x).tanh()
            return x

    def make():
        model = Skips()
        model.blocks = nn.ModuleList(Wrapped(block) for block in model.blocks)
        return model, torch.randn(2, 4)

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    for one, other in zip(trained(make, "every 3"), trained(make, False), strict=True):
        assert torch.equal(one, other)


def test_segments_are_runs_of_blocks_and_unknown_blocks_are_refused():
    assert segments("every 2", 5) == [[0, 1], [2, 3], [4]]
    assert segments("selective", 2) == segments(True, 2) == [[0], [1]]
    assert segments((3, 1), 4) == [[1], [3]] and segments(False, 4) == []
    with pytest.raises(InputError, match="names block 4, but the model has 4 blocks"):
        segments((4,), 4)


@pytest.mark.parametrize("value", ["every 0", "every", "some", [-1], 2.5])
def test_other_values_are_refused(value):
    with pytest.raises(InputError, match=r"train\.recompute"):
        Config.from_dict({"train": {"recompute": value}})


def test_values_are_read_from_files_and_flags():
    for value in (True, False, "selective", "every 4"):
        assert Config.from_dict({"train": {"recompute": value}}).train.recompute == value
    assert Config.from_dict({"train": {"recompute": [0, 2]}}).train.recompute == (0, 2)

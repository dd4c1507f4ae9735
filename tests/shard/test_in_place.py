"""Weight gradients computed in the memory that is reduced: torch's bits, without a copy, only where it is safe."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from support import config_of
from torch import nn
from torch.nn import functional

from mpitrain.shard import in_place
from mpitrain.shard.ddp import DistributedDataParallel
from mpitrain.shard.gradients import ShardedGradients, WholeGradients
from mpitrain.shard.in_place import InPlace, Linear
from mpitrain.trainer.engine import Engine

WIDTH = 256


@pytest.fixture(autouse=True)
def small_threshold(monkeypatch):
    monkeypatch.setattr(in_place, "MIN_ELEMENTS", WIDTH**2)


class OnePlace:
    """Memory for the gradient of one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.memory, self.requests = torch.empty_like(weight), 0

    def place(self, parameter):
        if parameter.grad is not None or self.requests:
            return None
        self.requests += 1
        return self.memory.view_as(self.memory)

    def contains(self, gradient) -> bool:
        return gradient.data_ptr() == self.memory.data_ptr()


@pytest.fixture
def pair():
    """Return a plain layer, the same layer with memory for its gradient, and that memory."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH)
    layer = copy.deepcopy(plain)
    place = OnePlace(layer.weight.detach())
    hooked = InPlace(layer, layer.parameters(), place)
    yield plain, layer, place
    hooked.remove()
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("out", "into", "shape"), [(512, 256, (1, 128, 256)), (256, 300, (3, 7, 300)), (700, 100, (2, 3, 2, 100))]
)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_those_of_nn_linear(dtype, out, into, shape, bias):
    torch.manual_seed(0)
    plain = nn.Linear(into, out, bias).to(dtype)
    layer = copy.deepcopy(plain)
    place = OnePlace(layer.weight.detach())
    hooked = InPlace(layer, layer.parameters(), place)
    results = []
    for module in (plain, layer):
        x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = module(x * 1.5)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert place.contains(layer.weight.grad)
    hooked.remove()


def embeddings(**options):
    """Return a plain embedding, the same with memory for its gradient, and that memory."""
    torch.manual_seed(0)
    plain = nn.Embedding(WIDTH, WIDTH, **options)
    layer = copy.deepcopy(plain)
    place = OnePlace(layer.weight.detach())
    return plain, layer, place, InPlace(layer, layer.parameters(), place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("calls", [1, 2])
def test_outputs_and_gradients_equal_those_of_nn_embedding(dtype, padding, calls):
    plain, layer, place, hooked = embeddings(dtype=dtype, padding_idx=padding)
    rows = torch.randint(WIDTH, (calls, 7, 300), generator=torch.Generator().manual_seed(1))  # each row several times
    rows[:, 0, :9] = 3
    slopes = torch.randn(7, 300, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(2))
    for module in (plain, layer):
        sum((module(each) * slopes).sum() for each in rows).backward()
        (module(rows[0, :, :5].int()) * slopes[:, :5]).sum().backward()  # adds to the first gradient
    assert torch.equal(layer(rows), plain(rows)) and torch.equal(layer.weight.grad, plain.weight.grad)
    assert place.contains(layer.weight.grad) == (calls == 1)  # else autograd has added two gradients up
    hooked.remove()
    assert type(layer) is nn.Embedding


OTHERS = [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_embeddings_with_further_options_use_the_normal_computation(options):
    plain, layer, place, _ = embeddings(**options)
    for module in (plain, layer):
        module(torch.tensor([5, 1, 5])).square().sum().backward()
    assert torch.equal(layer.weight.grad.to_dense(), plain.weight.grad.to_dense()) and place.requests == 0


def test_gradients_of_an_embedding_s_gradients_are_right():
    gradients = []
    for module in embeddings()[:2]:
        (slope,) = torch.autograd.grad(module(torch.tensor([5, 1, 5])).pow(3).sum(), module.weight, create_graph=True)
        slope.square().sum().backward()
        gradients.append(module.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_second_backward_pass_adds_to_the_first(pair):
    plain, layer, place = pair
    x = torch.randn(5, WIDTH)
    for module in (plain, layer):
        module(x).square().sum().backward()
        module(x + 1).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert place.contains(layer.weight.grad) and place.requests == 1


def test_autograd_grad_does_not_use_flat_memory(pair):
    plain, layer, place = pair
    x = torch.randn(5, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, plain.weight, plain.bias])
    gradients = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, layer.bias])
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert place.requests == 0


def test_gradients_of_gradients_are_right(pair):
    gradients = []
    for module in pair[:2]:
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradients.append((x.grad, module.weight.grad))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("elsewhere", ["compiled", "torch.func", "autocast", "a copy", "frozen", "not contiguous"])
def test_unsupported_cases_use_the_normal_computation(pair, elsewhere):
    plain, layer, place = pair
    results = []
    for module in (plain, layer):
        x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        weight = module.weight
        if elsewhere == "compiled":
            y = torch.compile(module, backend="eager")(x)
        elif elsewhere == "torch.func":
            y = torch.func.vmap(module)(x[:, None])
        elif elsewhere == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y = module(x)
        elif elsewhere == "a copy":
            module = copy.deepcopy(module)
            weight = module.weight
            y = module(x)
        elif elsewhere == "frozen":
            y = module.requires_grad_(False)(x)
        else:
            y = module(x.t())
        y.sum().backward()
        results.append([y, x.grad, weight.grad])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert elsewhere == "frozen" or torch.equal(results[0][2], results[1][2])
    assert place.requests == 0


def test_small_tied_and_derived_layers_are_unchanged():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Own(WIDTH, WIDTH), nn.Linear(9, 9)
    )
    model[1].weight = model[2].weight
    hooked = InPlace(model, model.parameters(), OnePlace(model[0].weight.detach()))
    assert [type(layer) for layer in model] == [Linear, nn.Linear, nn.Linear, Own, nn.Linear]
    hooked.remove()
    assert type(model[0]) is nn.Linear


class Wide(nn.Module):
    """Model with a layer used twice in a pass, one tied to an embedding, and small parameters in each block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, output, y):
        return functional.cross_entropy(output, y)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.twice(torch.tanh(self.twice(x))))


LARGE = 5  # weights of `Wide` that have a place: of the blocks, and of `twice`, once in a pass


@pytest.fixture
def placed_parameters(monkeypatch):
    """Return a list of the parameters whose memory was handed out, in order."""
    parameters: list[nn.Parameter] = []
    for kind in (WholeGradients, ShardedGradients):
        original = kind.place

        def place(self, parameter, original=original):
            memory = original(self, parameter)
            if memory is not None:
                parameters.append(parameter)
            return memory

        monkeypatch.setattr(kind, "place", place)
    return parameters


def train(comm, **options):
    """Train two steps of two microbatches; return the parameters."""
    model = Wide()
    engine = Engine(model, model.loss, torch.optim.AdamW(model.parameters(), lr=1e-3), comm, config_of(**options))
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(2):
        x = torch.randint(WIDTH, (2, 8), generator=generator)
        engine.forward_backward([[(row, row + 1 - row // (WIDTH - 1)) for row in x]], 16 * comm.size)
        engine.step()
    state = engine.state_dict()
    engine.close()
    assert all(type(layer) is not Linear for layer in model.modules())
    return state


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("spare_cores", [0, 1])
@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3, "share_node": False}], ids=str)
def test_training_has_the_same_bits_as_with_copies(world, options, spare_cores, placed_parameters, monkeypatch):
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=spare_cores))
    comm = world.split(0)
    in_place_state = train(comm, bucket_mb=0.7, **options)
    count = len(placed_parameters)
    monkeypatch.setattr(in_place, "MIN_ELEMENTS", 1 << 40)
    reference_state = train(comm, bucket_mb=0.7, **options)
    assert all(torch.equal(in_place_state[name], reference_state[name]) for name in reference_state)
    # the first microbatch of a step, or each of them where every one is reduced
    passes = 2 * (2 if options["zero"] >= 2 else 1)
    # a gathered model's root unit has the last bucket, but `twice`, which is in it, comes first
    each = LARGE - ("share_node" in options)
    assert (count, len(placed_parameters) - count) == (each * passes, 0)
    comm.free()


@pytest.mark.ranks(1, 2)
def test_distributed_data_parallel_computes_in_place_and_rebuilds(world, placed_parameters):
    wrapped, plain = DistributedDataParallel(Wide(), world, bucket_mb=0.5), Wide()
    tokens = torch.randint(WIDTH, (3, world.size, 8), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for module in (wrapped, plain):
            for parameter in module.parameters():
                parameter.grad = None
        wrapped.module.loss(wrapped(tokens[step, world.rank]), tokens[step, world.rank]).backward()
        for mine in tokens[step]:
            (plain.loss(plain(mine), mine) / world.size).backward()
        for a, b in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    assert len(placed_parameters) == 3 * LARGE

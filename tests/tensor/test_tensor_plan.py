"""Tensor plans for a user's own models, by module names, and one-line errors for wrong plans."""

import copy

import pytest
import torch
from tensor_support import CLOSE, check_gradients
from torch import nn
from torch.nn import functional

from mpitrain.errors import InputError
from mpitrain.layout.boxes import is_replicated
from mpitrain.tensor import Column, Row, parallelize, plan_for
from mpitrain.tensor.plan import _pairs
from mpitrain.tensor.styles import STYLES


class Attention(nn.Module):
    """Attention with separate projections and grouped heads for keys and values; counts its heads."""

    def __init__(self, width=24, heads=6, groups=6):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, groups, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, groups * self.head_dim)
        self.v = nn.Linear(width, groups * self.head_dim)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention with a fused layer whose first dimension is the heads: [heads, 3, head_dim]."""

    def __init__(self, width=24, heads=6):
        super().__init__()
        self.head_dim = width // heads
        self.query_key_value, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        qkv = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(3), is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """MLP with gate and value in one linear layer."""

    def __init__(self, width=24, hidden=10):
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Model(nn.Module):
    """Model with learned positions and an untied head."""

    def __init__(self, attention=Attention, vocabulary=29):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, 24), nn.Embedding(16, 24)
        self.drop = nn.Dropout(0.0)
        self.norm1, self.norm2, self.last = nn.LayerNorm(24), nn.LayerNorm(24), nn.LayerNorm(24)
        self.attention, self.mlp = attention(), GatedMLP()
        self.head = nn.Linear(24, vocabulary)
        self.criterion = nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1)

    def forward(self, tokens):
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.last(x))

    def loss(self, scores, y):
        return self.criterion(scores.flatten(0, 1), y.flatten())


MLP_PLAN = {"mlp.gate_up": Column(sections=2), "mlp.down": "row"}
ATTENTION_PLAN = {"attention.[qkv]": "column", "attention.o": "row"}
VOCABULARY_PLAN = {"tokens": "vocabulary", "head": "vocabulary"}


def compare(world, undivided, plan, sequence=False, whole=()):
    model = copy.deepcopy(undivided)
    assert parallelize(model, world, plan, sequence, whole) is model
    tokens = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    losses = [m.loss(m(x), y) for m in (model, undivided)]
    torch.testing.assert_close(losses[0], losses[1], **CLOSE)
    for loss in losses:
        loss.backward()
    check_gradients(world, model, undivided)
    return model


def build(**options):
    torch.manual_seed(0)
    return Model(**options)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_users_model_is_divided_by_module_names(world, sequence):
    plan = ATTENTION_PLAN | MLP_PLAN | VOCABULARY_PLAN
    beginning = {"drop": "scatter", "positions": "whole"}  # where the tokens meet the positions, all is whole
    compare(world, build(), plan | beginning, sequence)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_only_a_part_of_a_model_may_be_divided(world, sequence):
    rest = {"drop": "scatter", "positions": "whole", "tokens": "whole", "last": "gather", "head": "whole"}
    compare(world, build(), ATTENTION_PLAN | MLP_PLAN | (rest if sequence else {}), sequence)
    compare(world, build(), {"head": Column(gather=True), "attention.o": Row(scatter=True)})


@pytest.mark.ranks(2)
def test_grouped_heads_are_divided_with_their_keys_and_values(world):
    whole = build(attention=lambda: Attention(heads=6, groups=2))
    compare(world, whole, ATTENTION_PLAN)


@pytest.mark.ranks(2, 3)
def test_fused_layer_with_heads_first_needs_the_number_of_heads(world):
    whole = build(attention=Fused)
    with pytest.raises(InputError, match=r"query_key_value: its name does not show the order .* Column\(sections=1"):
        parallelize(copy.deepcopy(whole), world, {"attention.query_key_value": "column", "attention.o": "row"})
    compare(world, whole, {"attention.query_key_value": Column(sections=1, heads=6), "attention.o": "row"})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"qkv": nn.Linear(4, 12), "one": nn.Linear(4, 8), "two": nn.Linear(8, 4)})
        self.three = nn.Linear(4, 8, bias=False)
        self.three.weight = self.inner["one"].weight
        self.norm = nn.BatchNorm1d(4)
        self.embedding = nn.Embedding(5, 4, max_norm=1.0)
        self.other = nn.MultiheadAttention(4, 2)


GOOD = {"inner.one": "column", "inner.two": "row", "three": "column"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"innr.on": "column"}, "the plan's 'innr.on' matches no module of Tied; did you mean 'inner.one'?"),
        ({"inner.one": "colum"}, "the plan's 'inner.one' is 'colum', which is unknown; use one of column, row, "),
        ({"inner.*": "row", "inner.one": "column"}, "inner.one is matched by 'inner.*' and 'inner.one' of the plan"),
        ({"norm": "column", **GOOD}, "norm is a BatchNorm1d, which cannot be divided as 'column'; only a plain nn.Lin"),
        ({"other.out_proj": "row"}, "other.out_proj is a NonDynamicallyQuantizableLinear, which cannot be divided as"),
        ({"inner.two": "vocabulary"}, "inner.two leaves the scores divided, but Tied has no attribute `criterion`"),
        ({"embedding": "vocabulary"}, "embedding: an embedding with max_norm cannot be divided"),
        ({"inner.one": "column", "inner.two": "row"}, "three shares weight with inner.one, which the plan divides; gi"),
        ({**GOOD, "three": "row"}, "inner.one and three share weight, but the plan divides it differently"),
        ({"inner.one": "column"}, "the plan divides the outputs of inner.one, but has no row layer that takes them"),
        ({"inner.qkv": "column", "inner.two": "row"}, "inner.qkv is fused, but ModuleDict has no attribute with the"),
        ({**GOOD, "three": Column(sections=3)}, "three has 8 outputs, not 3 equal parts; pass the sizes"),
        ({**GOOD, "three": Column(sections=(4, 5))}, "three has 8 outputs, but the sections [4, 5] sum to 9; make"),
    ],
)
def test_invalid_plans_are_refused(world, plan, message):
    with pytest.raises(InputError) as caught:
        parallelize(Tied(), world, plan)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.agreed


@pytest.mark.ranks(2, 4)
def test_indivisible_heads_are_refused_with_possible_numbers(world):
    attention = nn.ModuleDict({"attention": Attention(width=18, heads=3, groups=3)})
    with pytest.raises(InputError) as caught:
        parallelize(attention, world, ATTENTION_PLAN)
    near = {2: "2 or 4 heads", 4: "4 heads"}[world.size]
    assert str(caught.value) == (
        f"attention.q: 3 heads cannot be divided evenly over {world.size} tensor ranks; use 1 or 3 ranks, or {near}"
    )


@pytest.mark.ranks(2)
def test_attention_layers_are_divided_all_or_none(world):
    attention = nn.ModuleDict({"attention": Attention()})
    with pytest.raises(
        InputError, match=r"attention.num_heads is the number of heads of all its linear layers, but .* omits k, v"
    ):
        parallelize(attention, world, {"attention.q": "column", "attention.o": "row"})


@pytest.mark.ranks(2)
def test_sequence_parallel_plan_must_name_modules_with_parameters(world):
    with pytest.raises(
        InputError, match=r"positions has parameters, but the plan does not define whether it works on a"
    ):
        parallelize(build(), world, {**ATTENTION_PLAN, **MLP_PLAN, **VOCABULARY_PLAN, "drop": "scatter"}, sequence=True)


def test_model_without_a_plan_is_refused_with_the_fix():
    with pytest.raises(InputError, match=r"Sequential does not define how to divide it; add a method tensor_plan\(\)"):
        plan_for(nn.Sequential(nn.Linear(4, 2)))


@pytest.mark.ranks(2, 3)
def test_some_layers_of_a_plan_can_stay_whole(world):
    plan = ATTENTION_PLAN | MLP_PLAN | VOCABULARY_PLAN
    for whole in (["attention.*", "head"], ["mlp.*", "tokens"], ["*"]):
        model = compare(world, build(), plan, whole=whole)
        replicated = {name.rpartition(".")[0] for name, p in model.named_parameters() if is_replicated(p)}
        assert ({"attention.q", "attention.o"} <= replicated) == ("attention.*" in whole or "*" in whole)
        assert ("tokens" in replicated, "mlp.gate_up" in replicated) == ((whole != ["attention.*", "head"],) * 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("plan", "whole", "message"),
    [
        (GOOD, ["inner.on"], "parallel.whole 'inner.on' matches no layer that the plan divides; did you mean 'inner.o"),
        (GOOD | {"norm": "whole"}, ["norm"], "parallel.whole 'norm' matches no layer that the plan divides; did you"),
        (GOOD, ["inner.one", "three"], "parallel.whole names inner.one but not inner.two, which are a pair; name both"),
        (GOOD, ["inner.two"], "parallel.whole names inner.two but not inner.one, which are a pair; name both, or neit"),
        (GOOD, ["inner.*"], "parallel.whole names inner.one but not three, which share a weight; name both, or neith"),
    ],
)
def test_invalid_whole_layers_are_refused(world, plan, whole, message):
    with pytest.raises(InputError) as caught:
        parallelize(Tied(), world, plan, whole=whole)
    assert message in str(caught.value) and "\n" not in str(caught.value) and caught.value.agreed
    with pytest.raises(InputError, match=r"parallel.whole cannot be combined with parallel.sequence"):
        parallelize(Tied(), world, plan, sequence=True, whole=whole)


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        ("a.q+ a.k+ a.v+ a.o- m.up+ m.down-", ["a.q a.k a.v a.o", "m.up m.down"]),
        ("q+ k+ v+ o- gate+ up+ down-", ["q k v o", "gate up down"]),
        ("m.w1+ m.w2- m.w3+", ["m.w1 m.w2 m.w3"]),  # Llama's order
        ("s.q+ s.k+ o.dense- i.dense+ d.dense-", ["s.q s.k o.dense", "i.dense d.dense"]),  # BERT's parents
        ("b.in+ b.out- b.down-", ["b.in b.out b.down"]),
    ],
)
def test_pairs_are_found_by_parents_and_by_order(names, pairs):
    styles = {name[:-1]: STYLES["column" if name[-1] == "+" else "row"] for name in names.split()}
    assert sorted(map(" ".join, _pairs(list(styles), styles))) == sorted(pairs)

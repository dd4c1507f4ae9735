import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpitrain.models.gpt import GPT, Attention, _recent_factors, rotary_factors, rotate
from mpitrain.models.losses import cross_entropy


def make_small(vocabulary: int = 23, layers: int = 2, width: int = 16, heads: int = 4, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary, layers, width, heads, dropout)


@pytest.mark.parametrize(
    ("vocabulary", "layers", "width", "heads"), [(256, 2, 128, 4), (1000, 5, 48, 3), (50257, 12, 768, 12)]
)
def test_number_of_parameters_matches_the_formula(vocabulary, layers, width, heads):
    with torch.device("meta"):
        model = GPT(vocabulary, layers, width, heads)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == vocabulary * width + layers * (12 * width**2 + 13 * width) + 2 * width


def test_names_and_shapes_of_the_divisible_linear_layers():
    shapes = {
        name: tuple(module.weight.shape) for name, module in make_small().named_modules() if hasattr(module, "weight")
    }
    assert shapes["embedding"] == shapes["head"] == (23, 16)
    for layer in range(2):
        assert shapes[f"blocks.{layer}.attention.qkv"] == (48, 16)
        assert shapes[f"blocks.{layer}.attention.out"] == (16, 16)
        assert shapes[f"blocks.{layer}.mlp.up"] == (64, 16)
        assert shapes[f"blocks.{layer}.mlp.down"] == (16, 64)


def test_head_and_embedding_are_one_parameter():
    model = make_small()
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()].count("embedding.weight") == 1
    assert "head.weight" not in dict(model.named_parameters())
    tokens = torch.randint(0, 22, (2, 5))  # never token 22: its row gets a gradient from the head alone
    model.loss(model(tokens), tokens).backward()
    assert model.embedding.weight.grad[22].abs().sum() > 0


def test_a_later_token_does_not_change_earlier_scores():
    model = make_small().eval()
    tokens = torch.randint(0, 23, (2, 9))
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 23
    after = model(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=0)
    for position in (6, 7, 8):
        assert (after[:, position] - before[:, position]).abs().max() > 1e-4


def test_the_order_of_earlier_tokens_matters():
    model = make_small().eval()
    scores = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert (scores[0, 2] - scores[1, 2]).abs().max() > 1e-6


def test_rotary_products_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    turned = rotate(torch.stack([q, k]).expand(1, 12, 2, 8), rotary_factors(0, 12, 8, 1e4, q.device))[
        0
    ]  # the same pair at 12 positions
    products = turned[:, 0] @ turned[:, 1].T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert products[0].std() > 0.1  # and they do depend on it
    torch.testing.assert_close(turned[0], torch.stack([q, k]), rtol=0, atol=0)
    # one position turns the pairs of features by 1, 0.1, 0.01 and 0.001 radian
    pairs = torch.view_as_complex(turned[:2, 0].reshape(2, 4, 2))
    torch.testing.assert_close((pairs[1] / pairs[0]).angle(), torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=0, atol=1e-5)


def test_kept_rotations_are_usable_everywhere():
    model, tokens = make_small(), torch.randint(23, (2, 7))
    _recent_factors.clear()
    with FakeTensorMode():
        make_small()(torch.zeros(2, 7, dtype=torch.int64))
    torch.func.grad(lambda x: model.blocks[0](x).sum())(torch.zeros(2, 7, model.head.in_features))
    assert _recent_factors == {}  # values are missing, or belong to the transform
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    for sequence in range(1, 12):
        model(torch.zeros(1, sequence, dtype=torch.int64))
    ((first, sequence, width, base), factors), *others = _recent_factors.items()
    assert len(others) < 4
    assert torch.equal(factors, rotary_factors(first, sequence, width, base, tokens.device))


def test_attention_is_the_textbook_sum():
    torch.manual_seed(0)
    attention = Attention(width=8, heads=2, dropout=0.0)
    x = torch.randn(1, 5, 8)
    qkv = (x @ attention.qkv.weight.T + attention.qkv.bias).reshape(1, 5, 3, 2, 4)
    q, k = (rotate(qkv[:, :, at], rotary_factors(0, 5, 4, 1e4, x.device)) for at in (0, 1))
    mixed = torch.zeros(5, 2, 4)
    for head in range(2):
        for position in range(5):
            scores = q[0, position, head] @ k[0, : position + 1, head].T / 2.0  # sqrt(head_dim)
            mixed[position, head] = scores.softmax(-1) @ qkv[0, : position + 1, 2, head]
    expected = mixed.reshape(1, 5, 8) @ attention.out.weight.T + attention.out.bias
    torch.testing.assert_close(attention(x), expected)


def test_parts_of_the_heads_add_up_to_the_whole_attention():
    torch.manual_seed(0)
    whole = Attention(width=16, heads=4, dropout=0.0)
    x = torch.randn(2, 6, 16)
    total = whole.out.bias.clone()
    for heads in (slice(0, 1), slice(1, 4)):
        count = 4 * (heads.stop - heads.start)
        part = Attention(width=16, heads=4, dropout=0.0)
        part.qkv, part.out = nn.Linear(16, 3 * count), nn.Linear(count, 16, bias=False)
        with torch.no_grad():
            part.qkv.weight.copy_(whole.qkv.weight.view(3, 4, 4, 16)[:, heads].reshape(-1, 16))
            part.qkv.bias.copy_(whole.qkv.bias.view(3, 4, 4)[:, heads].flatten())
            part.out.weight.copy_(whole.out.weight.view(16, 4, 4)[:, heads].reshape(16, count))
        total = total + part(x)
    torch.testing.assert_close(total, whole(x))


def test_named_blocks_in_order_equal_the_model():
    model = make_small().eval()
    tokens = torch.randint(0, 23, (2, 7))
    x = tokens
    for name, block in model.pipeline_blocks():
        assert model.get_submodule(name) is block
        x = block(x)
    torch.testing.assert_close(x, model(tokens), rtol=0, atol=0)
    in_blocks = {id(parameter) for _, block in model.pipeline_blocks() for parameter in block.parameters()}
    assert in_blocks == {id(parameter) for parameter in model.parameters()}


def test_initial_loss_is_that_of_a_uniform_guess():
    model = make_small(vocabulary=256, width=128)
    tokens, y = torch.randint(0, 256, (2, 4, 64))
    assert model.loss(model(tokens), y).item() == pytest.approx(math.log(256), abs=0.1)


def test_loss_is_the_mean_over_samples():
    output, y = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    each = [-output[i].log_softmax(-1)[torch.arange(5), y[i]].mean() for i in range(3)]
    torch.testing.assert_close(cross_entropy(output, y), torch.stack(each).mean())
    assert cross_entropy(output.bfloat16(), y).dtype == torch.float32


def test_gradients_match_finite_differences():
    model = make_small(layers=1).double()
    tokens, y = torch.randint(0, 23, (2, 2, 6))
    model.loss(model(tokens), y).backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        losses = []
        for sign in (1, -2):  # the second step undoes the first and goes as far the other way
            parameter.data.add_(direction, alpha=sign * 1e-5)
            losses.append(model.loss(model(tokens), y).item())
        parameter.data.add_(direction, alpha=1e-5)
        slope = (losses[0] - losses[1]) / 2e-5
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-8), name


def test_bf16_autocast_stays_near_fp32():
    model = make_small(vocabulary=256, width=64)
    tokens, y = torch.randint(0, 256, (2, 4, 32))
    expected = model.loss(model(tokens), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(tokens)
        loss = model.loss(output, y)
    assert output.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_the_same_seed_gives_the_same_weights():
    one, two = make_small().state_dict(), make_small().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    torch.manual_seed(1)
    assert not torch.equal(GPT(23, 2, 16, 4).embedding.weight, one["embedding.weight"])


def test_residual_layers_are_initialized_smaller_with_depth():
    torch.manual_seed(0)
    model = GPT(256, layers=8, width=128, heads=4)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        elif name.endswith("bias"):
            assert not parameter.any(), name


def test_dropout_acts_in_training_only():
    model = make_small(dropout=0.5)
    tokens = torch.randint(0, 23, (2, 7))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_few_steps_lower_the_loss():
    model = make_small(vocabulary=11, width=32)
    tokens = torch.arange(64).remainder(11).view(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model.loss(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 < 2.0 < losses[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_scores_of_the_cpu():
    model = make_small().eval()
    tokens = torch.randint(0, 23, (2, 7))
    expected = model(tokens)
    torch.testing.assert_close(model.cuda()(tokens.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)

import pytest
import torch
from torch import nn

from mpitrain.models.losses import cross_entropy, squared_error
from mpitrain.models.mlp import MLP


def make_small(layers: int = 2, dropout: float = 0.0) -> MLP:
    torch.manual_seed(0)
    return MLP(12, 3, layers, 8, cross_entropy, dropout)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_number_of_parameters_matches_the_formula(layers):
    count = sum(parameter.numel() for parameter in make_small(layers).parameters())
    assert count == (12 + 1) * 8 + (layers - 1) * (8 + 1) * 8 + (8 + 1) * 3


def test_linear_layers_alternate_with_relu():
    model = make_small(layers=1)
    x = torch.randn(5, 3, 4)
    linear = model.hidden[0][0]
    hidden = (x.reshape(5, 12) @ linear.weight.T + linear.bias).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ model.head.weight.T + model.head.bias)
    torch.testing.assert_close(model(torch.ones(5, 3, 4, dtype=torch.int64)), model(torch.ones(5, 3, 4)))


def test_named_blocks_in_order_equal_the_model():
    model = make_small(3)
    x = torch.randn(5, 3, 4)
    out = x
    for name, block in model.pipeline_blocks():
        assert model.get_submodule(name) is block
        out = block(out)
    torch.testing.assert_close(out, model(x), rtol=0, atol=0)


def test_a_single_number_per_sample_does_not_broadcast():
    output, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 0.0, 1.0])
    assert squared_error(output, y).item() == pytest.approx((0 + 4 + 9) / 3)
    assert squared_error(torch.zeros(2, 4), torch.full((2, 2, 2), 3.0)).item() == pytest.approx(9.0)
    with pytest.raises(RuntimeError):
        squared_error(output, torch.zeros(4))


def test_dropout_acts_in_training_only():
    model = make_small(dropout=0.5)
    x = torch.randn(4, 12)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_the_variance_of_features_is_stable_with_depth():
    torch.manual_seed(0)
    model = MLP(256, 3, 8, 256, cross_entropy)
    x = torch.randn(64, 256)
    for layer in model.hidden:
        x = layer(x)
    assert 0.3 < x.square().mean().item() < 3.0


def test_a_few_steps_lower_the_loss():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = MLP(4, 1, 2, 32, squared_error)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model.loss(model(x), x.square().sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert isinstance(model.head, nn.Linear)

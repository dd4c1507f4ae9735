from dataclasses import dataclass

import pytest
import torch

from mpitrain.config.settings import Config
from mpitrain.config.training import ModelSection
from mpitrain.errors import InputError
from mpitrain.models import Task, build_model
from mpitrain.models.gpt import GPT
from mpitrain.models.mlp import MLP
from mpitrain.models.resnet import ResNet
from mpitrain.pipe.partition import listed_blocks


@dataclass(frozen=True)
class Data:
    kind: str = "arrays"
    x_shape: tuple[int, ...] = ()
    y_shape: tuple[int, ...] = ()
    vocabulary: int | None = None
    classes: tuple[str, ...] | None = None
    apart: int | None = None
    masked: bool = False


TEXT = Data("tokens", (32,), (32,), vocabulary=256)
DIGITS = Data(x_shape=(1, 8, 8), classes=tuple("0123456789"))
PHOTOS = Data(x_shape=(3, 96, 80), classes=("cat", "dog"))
TABLE = Data(x_shape=(7,), y_shape=())
FIELDS = Data(x_shape=(5, 4, 16, 16), y_shape=(2, 16))


def build(data: Data, **model) -> Task:
    torch.manual_seed(0)
    return build_model(Config.from_dict({"model": model}).model, data)


def check_trains(task: Task, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = task.loss(task.module(x), y)
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    out = x
    for name, block in listed_blocks(task.module):
        assert task.module.get_submodule(name) is block
        out = block(out)
    assert out.shape == task.module(x).shape


def test_models_take_their_shapes_from_the_data():
    task = build(TEXT)
    assert isinstance(task.module, GPT) and task.module.head.out_features == 256
    check_trains(task, *torch.randint(0, 256, (2, 3, 32)))

    task = build(DIGITS, name="resnet", layers=18, width=8)
    assert isinstance(task.module, ResNet) and task.module.head.out_features == 10
    assert task.module.stem.convolution.kernel_size == (3, 3)
    check_trains(task, torch.rand(2, 1, 8, 8), torch.tensor([3, 9]))

    task = build(PHOTOS, name="resnet", layers=18, width=8)
    assert task.module.stem.convolution.kernel_size == (7, 7) and task.module.head.out_features == 2
    check_trains(task, torch.rand(2, 3, 96, 80), torch.tensor([0, 1]))

    task = build(DIGITS, name="mlp", layers=3, width=8)
    assert isinstance(task.module, MLP) and len(task.module.hidden) == 3
    check_trains(task, torch.rand(2, 1, 8, 8), torch.tensor([3, 9]))

    task = build(TABLE, name="mlp", width=8)
    assert task.module.head.out_features == 1
    check_trains(task, torch.rand(4, 7), torch.rand(4))

    task = build(FIELDS, name="mlp", width=8)
    assert task.module.head.out_features == 32
    check_trains(task, torch.rand(4, 5, 4, 16, 16), torch.rand(4, 2, 16))


@pytest.mark.parametrize("shape", [(24, 20), (24, 20, 3), (3, 24, 20), (3, 24, 4), (20, 24, 20)])
def test_a_resnet_reads_images_of_every_layout(shape):
    task = build(Data(x_shape=shape, y_shape=(2,)), name="resnet", layers=18, width=4)
    channels = {(24, 20): 1, (20, 24, 20): 20}.get(shape, 3)
    assert task.module.stem.convolution.in_channels == channels
    check_trains(task, torch.rand(2, *shape), torch.rand(2, 2))


def test_small_images_are_recognised_by_their_longer_side():
    for shape, kernel in (((3, 64, 64), 3), ((3, 65, 8), 7), ((65, 8, 3), 7), ((64, 64), 3)):
        task = build(Data(x_shape=shape), name="resnet", layers=18, width=4)
        assert task.module.stem.convolution.kernel_size == (kernel, kernel), shape


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("gpt", DIGITS, ("gpt takes tokens", "images of shape (1, 8, 8)", "resnet", "or mlp")),
        ("gpt", TABLE, ("gpt takes tokens", "arrays of shape (7,)", "set model.name to mlp")),
        ("resnet", TEXT, ("resnet takes images", "data are tokens", "set model.name to gpt")),
        ("resnet", TABLE, ("resnet takes images", "arrays of shape (7,)", "set model.name to mlp")),
        ("resnet", FIELDS, ("resnet takes images", "(5, 4, 16, 16)", "set model.name to mlp")),
        ("mlp", TEXT, ("mlp takes arrays", "data are tokens", "set model.name to gpt")),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_with_a_suggestion(name, data, words):
    with pytest.raises(InputError) as caught:
        build(data, name=name, layers=18)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.agreed


def test_an_odd_head_size_is_refused_with_the_next_width():
    with pytest.raises(InputError, match=r"model\.width 12 .* model\.heads 4 .* set model\.width to 16"):
        build(TEXT, width=12, heads=4)


def test_options_without_a_factory_are_refused():
    with pytest.raises(InputError, match=r"model.options \['depth'\]"):
        build(TEXT, options={"depth": 3})


def test_configured_sizes_are_used():
    task = build_model(ModelSection(layers=3, width=24, heads=2, dropout=0.25), TEXT)
    assert len(task.module.blocks) == 3
    assert task.module.norm.normalized_shape == (24,)
    assert task.module.blocks[0].attention.head_dim == 12
    assert task.module.dropout.p == 0.25

import pytest
import torch
from torch import nn

from mpitrain.models.losses import cross_entropy
from mpitrain.models.resnet import ResidualBlock, ResNet


@pytest.mark.parametrize(("layers", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)])
def test_number_of_parameters_matches_the_paper(layers, count):
    with torch.device("meta"):
        model = ResNet(layers, 64, 3, 1000, cross_entropy, small=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_number_of_layers_matches_the_name():
    for layers in (18, 34, 50, 101):
        with torch.device("meta"):
            model = ResNet(layers, 8, 3, 10, cross_entropy, small=True)
        counted = [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear) and "shortcut" not in name
        ]
        assert len(counted) == layers


def make_tiny(layers: int = 18, channels: int = 3, small: bool = True, channels_last: bool = False) -> ResNet:
    torch.manual_seed(0)
    return ResNet(layers, 4, channels, 10, cross_entropy, small=small, channels_last=channels_last)


@pytest.mark.parametrize(("small", "sides"), [(True, [32, 32, 16, 8, 4]), (False, [8, 8, 4, 2, 1])])
def test_feature_map_sizes_match_the_paper(small, sides):
    model = make_tiny(small=small).eval()
    x = model.stem(torch.randn(1, 3, 32, 32))
    sizes = [x.shape[-1]]
    for stage in model.stages:
        x = stage(x)
        sizes.append(x.shape[-1])
    assert sizes == sides
    assert x.shape[1] == 4 * 8  # basic blocks do not widen beyond 8 times the stem


def test_the_stride_of_a_bottleneck_is_on_its_3x3_convolution():
    strides = [
        (module.kernel_size[0], module.stride[0])
        for module in ResidualBlock(16, 8, 2, bottleneck=True).residual
        if isinstance(module, nn.Conv2d)
    ]
    assert strides == [(1, 1), (3, 2), (1, 1)]


@pytest.mark.parametrize("layers", [18, 50])
def test_a_new_block_is_the_identity(layers):
    model = make_tiny(layers).eval()
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    same = [block for block in blocks if isinstance(block.shortcut, nn.Identity)]
    assert same and len(same) < len(blocks)
    for block in same:
        channels = block.residual[0].in_channels
        x = torch.rand(1, channels, 4, 4)
        torch.testing.assert_close(block(x), x, rtol=0, atol=0)
    assert all(not block.residual[-1].weight.any() for block in blocks)


def test_named_blocks_in_order_equal_the_model():
    model = make_tiny(50).eval()
    images = torch.randn(2, 3, 16, 16)
    x = images
    for name, block in model.pipeline_blocks():
        assert model.get_submodule(name) is block
        x = block(x)
    torch.testing.assert_close(x, model(images), rtol=0, atol=0)
    assert len(model.pipeline_blocks()) == 1 + 16 + 2


def test_image_layouts_give_the_same_scores():
    images = torch.rand(2, 3, 16, 16)
    expected = make_tiny().eval()(images)
    torch.testing.assert_close(make_tiny(channels_last=True).eval()(images.movedim(1, -1)), expected)
    grey = torch.randint(0, 17, (2, 16, 16))
    model = make_tiny(channels=1).eval()
    torch.testing.assert_close(model(grey), model(grey.float().unsqueeze(1)))


def test_the_same_seed_gives_the_same_weights():
    one, two = make_tiny().state_dict(), make_tiny().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_every_parameter_gets_a_gradient_and_a_few_steps_lower_the_loss():
    model = make_tiny(channels=1)
    images, y = torch.rand(8, 1, 16, 16), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(15):
        loss = model.loss(model(images), y)
        optimizer.zero_grad()
        loss.backward()
        if step == 2:  # by now the last BatchNorms have left zero and let gradients into the blocks
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), name
                assert parameter.grad.any(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]

import sys
import textwrap

import pytest
import torch
from torch import nn

from mpitrain.config.training import ModelSection
from mpitrain.errors import InputError
from mpitrain.models import build_model
from mpitrain.pipe.partition import listed_blocks

SOURCE = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, inputs, depth):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(depth))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

        def loss(self, output, y):
            return (output - y).abs().mean()

        def pipeline_blocks(self):
            return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]

    def make_net(description, depth=1):
        return Net(description["inputs"], depth)

    def pair(description):
        return nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.MSELoss()

    def number(description):
        return 3

    def lossless(description):
        return nn.Linear(1, 1)

    def empty(description):
        return nn.ReLU(), nn.MSELoss()

    def learned_loss(description):
        return nn.Linear(1, 1), Net(1, 1)

    def failing(description):
        raise ValueError("depth must be\\npositive")

    def failing_in_torch(description):
        return nn.Linear(2, "x")  # line 43

    def leaving(description):
        raise SystemExit("usage: ...")

    constant = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a user's folder, which is the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "networks.py").write_text(textwrap.dedent(SOURCE))
    (package / "needy.py").write_text("import a_package_nobody_has\n")
    (package / "broken.py").write_text("def make(:\n")
    (package / "script.py").write_text("import sys\nsys.exit('no arguments')\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "users_package"]:
        del sys.modules[name]


def build(function, options=None, module="users_package.networks"):
    return build_model(ModelSection(factory=f"{module}:{function}", options=options or {}), {"inputs": 4})


def refused(function, module="users_package.networks", options=None):
    with pytest.raises(InputError) as caught:
        build(function, options, module)
    assert "\n" not in str(caught.value)
    assert f"{module}:{function}" in str(caught.value)
    return str(caught.value)


def test_a_factory_in_the_current_folder_gives_a_module_with_loss_and_blocks(folder):
    task = build("make_net", {"depth": 3})
    assert len(task.module.layers) == 3
    assert [name for name, _ in listed_blocks(task.module)] == ["layers.0", "layers.1", "layers.2"]
    assert task.loss(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])).item() == 1.5


def test_a_pair_of_module_and_loss_works_and_a_sequential_can_be_cut(folder):
    task = build("pair")
    assert [name for name, _ in listed_blocks(task.module)] == ["0", "1"]
    assert isinstance(task.loss, nn.MSELoss)


def test_a_misspelt_function_or_module_gets_a_suggestion(folder):
    assert "did you mean 'make_net'?" in refused("make_nets")
    assert "did you mean 'users_package.networks'?" in refused("make_net", module="users_package.network")
    assert "did you mean 'users_package'?" in refused("make_net", module="user_package.networks")
    assert "no module 'zzzzzz'" in refused("make_net", module="zzzzzz")


def test_suggestions_do_not_include_imported_functions(folder):
    source = "from json import loads as builds, dumps as build_model\ndef network(d): ...\n"
    (folder / "users_package/borrowed.py").write_text(source)
    message = refused("build", "users_package.borrowed")
    assert message.endswith("has no function 'build'; define it there, or name one of network")


def test_errors_in_a_factory_are_reported_with_message_and_place(folder):
    assert "raised ValueError: depth must be positive (networks.py:40)" in refused("failing")
    assert "(networks.py:43)" in refused("failing_in_torch")
    assert "raised SystemExit: usage: ..." in refused("leaving")
    assert "unexpected keyword argument 'depht'" in refused("make_net", options={"depht": 2})
    assert "No module named 'a_package_nobody_has' (needy.py:1); install it" in refused("f", "users_package.needy")
    assert "SyntaxError" in (message := refused("f", "users_package.broken")) and "(broken.py:1)" in message
    assert "raised SystemExit: no arguments (script.py:2)" in refused("f", "users_package.script")


def test_the_original_exception_is_the_cause(folder):
    with pytest.raises(InputError) as caught:
        build("failing")
    assert isinstance(caught.value.__cause__, ValueError)


def test_untrainable_models_are_refused(folder):
    assert "returned int, not a model" in refused("number")
    assert "Linear has no loss; give it a method loss(output, y)" in refused("lossless")
    assert "ReLU has no parameter to train" in refused("empty")
    assert "loss Net has parameters, which would not be trained" in refused("learned_loss")
    assert "constant is int, not a function" in refused("constant")


def test_a_path_without_a_function_is_refused():
    with pytest.raises(InputError, match=r"write package\.module:function"):
        build_model(ModelSection(factory="users_package.networks"), {})

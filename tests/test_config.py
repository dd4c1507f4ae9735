"""The configuration: what is wrong is named, with the mend."""

from __future__ import annotations

import os

import pytest

from mpitrain.config.settings import Config, help_text, key_names
from mpitrain.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.stpes", "3"], "unknown key 'train.stpes'; did you mean 'train.steps'?"),
        (["--trian.steps", "3"], "did you mean 'train'?"),
        (["--steps", "3"], "did you mean 'train.steps'?"),
        (["--train.steps", "many"], "train.steps = 'many' is wrong"),
        (["--train.steps=-1"], "train.steps = -1 is wrong: input should be greater than or equal to 0"),
        (["--train.steps"], "--train.steps has no value"),
        (["--parallel.zero", "5"], "parallel.zero = 5 is wrong: input should be 0, 1, 2 or 3"),
        (["--comm.algorithm", "rnig"], "comm.algorithm = 'rnig' is wrong"),
        (["--model.width", "130"], "set model.width to 132"),
        (["--model.name", "resnet"], "a resnet has 18, 34, 50 or 101"),
        (["stray"], "config file stray does not exist"),
        (["--train.steps", "3", "stray"], "argument 'stray' is not understood"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_its_mend(arguments, message):
    with pytest.raises(InputError) as caught:
        Config.from_args(arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_later_arguments_win_over_earlier_ones_and_over_the_file(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text("[train]\nsteps = 5\nbatch = 7\n[optim.options]\nbetas = [0.8, 0.9]\n")
    config = Config.from_args([str(file), "--train.steps=6", "--train.steps", "8", "--run.dir", "123"])
    assert (config.train.steps, config.train.batch, config.run.dir) == (8, 7, "123")
    assert config.optim.options == {"betas": [0.8, 0.9]}


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    config = Config.from_args(["--model.options", "{depth = 3}", "--parallel.data", "4"])
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert Config.from_args([str(file)]) == config


@pytest.mark.parametrize("content", ["[train\n", "[nonsense]\nx = 1\n", "train = 3\n", "[train]\nstep = 3\n"])
def test_a_mistake_in_the_file_is_named(tmp_path, content):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(InputError, match=r"bad\.toml"):
        Config.from_args([str(file)])


def test_help_lists_every_key():
    text = help_text("mpitrain.train")
    assert all(f"--{name} " in text for name in key_names())


def test_what_is_no_configuration_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "config.toml"
    for make, undo in [
        (path.mkdir, path.rmdir),
        (lambda: os.mkfifo(path), path.unlink),
        (lambda: path.symlink_to(path), path.unlink),
        (lambda: path.symlink_to("/dev/zero"), path.unlink),
        (lambda: path.write_bytes(b"\xff\0" * 9), path.unlink),
        (lambda: path.write_text("a = " + "[" * 200_000), path.unlink),
        (lambda: path.write_text("[train]\nsteps = " + "9" * 5000), path.unlink),
        (lambda: path.write_text("train = 3"), path.unlink),
        (lambda: path.write_text("[train]\nsteps = 1979-05-27"), path.unlink),
    ]:
        make()
        with pytest.raises(InputError) as caught:
            Config.from_args([str(path), "--train.steps", "[" * 5000, "--train.batch", "4"])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
        undo()
    path.touch()
    assert Config.from_args([str(path)]) == Config()

"""The configuration: errors name the wrong setting and its fix."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
from support import job

from mpitrain.config.section import other_names
from mpitrain.config.settings import REMOVED, Config, help_text, sections
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
        (["--parallel.zero", "5"], "parallel.zero = 5 is wrong: input should be 'auto', 0, 1, 2 or 3"),
        (["--comm.algorithm", "rnig"], "comm.algorithm = 'rnig' is wrong"),
        (["--model.width", "130"], "set model.width to 132"),
        (["--model.name", "resnet", "--model.layers", "2"], "a resnet has 18, 34, 50 or 101"),
        (["--train.steps", "--train.batch", "4"], "--train.steps has no value"),
        (["--train", "3"], "train is a section; write --train.KEY VALUE, such as --train.steps"),
        (["-x"], "argument '-x' is not understood"),
        (["--train.batch_warmup", "[8, 100]"], "entry 1: 8 is not [steps, samples], two numbers of at least 1; write"),
        (["--train.batch_warmup", "[[100, 0]]"], "entry 1: [100, 0] is not [steps, samples]"),
        (["--train.batch_warmup", "8"], "train.batch_warmup = 8 is not a list of [steps, samples] pairs; write [[100"),
        (["--train.batch_warmup", "[[9, 64]]"], "has a batch of 64 samples, more than train.batch 32"),
        (["--train.rampup_batch_size", "[8, 8, 1000]"], "did you mean 'train.batch_warmup'?"),
        (["--train.lr", "1"], "unknown key 'train.lr'; did you mean 'optim.lr'?"),
        (["--learning-rate", "1"], "did you mean 'optim.lr'?"),
        (["--optim.batch", "8"], "did you mean 'train.batch'?"),
        (["--train.batch_size", "8"], "did you mean 'train.batch'? (train.batch counts the samples of all ranks"),
        (["--train.per_device_train_batch_size", "8"], "did you mean 'train.microbatch'? (train.batch is the global"),
        (["--train.amp", "true"], "did you mean 'train.precision'? (set it to bf16 or fp16)"),
        (["--train.bf16", "true"], "did you mean 'train.precision'? (set it to bf16 or fp16)"),
        (["--optim.warmup_ratio", "0.1"], "did you mean 'optim.warmup'? (optim.warmup counts steps)"),
        (["train.steps=5"], "command line: train.steps=5 has no dashes; write --train.steps 5"),
        (["train.steps", "5"], "command line: train.steps has no dashes; write --train.steps VALUE"),
        (["--train.epochs", "2", "--train.steps", "5"], "train.epochs and train.steps both set the length of the run"),
        (
            ["--train.accumulation", "2", "--train.microbatch", "5"],
            "both set how the samples of a rank are divided; remove",
        ),
        (["--optim.learning_rte", "8"], "did you mean 'optim.lr'?"),
        (["--scheduler.warmup", "8"], "unknown key 'scheduler.warmup'; did you mean 'optim.warmup'?"),
        (["--trainer.lr", "1"], "unknown key 'trainer.lr'; did you mean 'optim.lr'?"),
        (["--optimizer.lr", "1"], "unknown key 'optimizer'; did you mean 'optim'?"),
        (["--train.schedule", "cosine"], "did you mean 'optim.schedule' or 'parallel.schedule'?"),
        (["--train.every", "3"], "did you mean 'checkpoint.every' or 'monitor.every'?"),
        (["--quux", "3"], "unknown key 'quux'; see --help for the list"),
        (["--model.options", "{a: 1"], 'valid dictionary; write {a = 1} or {"a": 1}'),
        (
            ["--parallel.cut", "tme"],
            "parallel.cut 'tme' is unknown; set it to uniform, parameters or time, or to the",
        ),
        (
            ["--parallel.cut", "[5, 0]"],
            "parallel.cut [5, 0] is not a list of the number of blocks of each stage; give numbers of at least 1",
        ),
        (["--parallel.whole", "a"], 'parallel.whole = \'a\' is wrong: input should be a valid tuple; write ["a", "b"]'),
        (["stray"], "config file stray does not exist"),
        (["one.toml", "--train.steps", "3", "two.toml"], "one.toml and two.toml are two configuration files"),
        (["--train.steps", "3", "stray"], "config file stray does not exist"),
    ],
)
def test_command_line_error_names_the_setting_and_the_fix(arguments, message):
    with pytest.raises(InputError) as caught:
        Config.from_args(arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_defaults_of_a_model_appear_in_help_and_in_the_resolved_file(tmp_path):
    config = Config.from_args(["--model.name", "resnet", "--model.width", "16"])
    assert (config.model.layers, config.model.width) == (18, 16)
    assert (config.optim.name, config.optim.lr, config.optim.options) == ("sgd", 0.05, {"momentum": 0.9})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert Config.from_args([str(tmp_path / "config.toml")]) == config
    adam = Config.from_args(["--model.name=resnet", "--optim.name=adam"])  # whose rate is not that of SGD
    assert (adam.optim.lr, adam.optim.options, adam.model.layers) == (Config().optim.lr, {}, 18)
    rate = Config.from_args(["--model.name=resnet", "--optim.lr=0.2"]).optim
    assert (rate.name, rate.lr) == ("sgd", 0.2)
    with_factory = Config.from_args(["--model.name=resnet", "--model.factory=a:b"])
    assert (with_factory.model.layers, with_factory.optim) == (Config().model.layers, Config().optim)
    assert "[2; resnet: 18]" in help_text("mpitrain.train")


ALIASES = {
    "train.global_batch_size": ("train.batch", 48),
    "train.micro_batch_size": ("train.microbatch", 3),
    "train.num_train_epochs": ("train.epochs", 1.5),
    "train.max_steps": ("train.steps", 7),
    "train.gradient_accumulation_steps": ("train.accumulation", 4),
    "train.max_grad_norm": ("train.clip", 0.5),
    "train.gradient_checkpointing": ("train.recompute", True),
    "train.learning_rate": ("optim.lr", 0.125),
    "optim.learning_rate": ("optim.lr", 0.25),
    "optim.warmup_steps": ("optim.warmup", 3),
    "model.hidden_size": ("model.width", 64),
}


def test_aliases_of_other_tools_are_accepted_and_our_name_is_printed_once(tmp_path, monkeypatch):
    for theirs, (ours, value) in ALIASES.items():
        (section, key), (our_section, name) = theirs.split("."), ours.split(".")
        file = tmp_path / "my.toml"
        file.write_text(f"[{section}]\n{key} = {json.dumps(value)}\n")
        for origin, read in (
            ("command line", lambda theirs=theirs, value=value: Config.from_args([f"--{theirs}", str(value).lower()])),
            (str(file), lambda file=file: Config.from_args([str(file)])),
            ("config", lambda section=section, key=key, value=value: Config.from_dict({section: {key: value}})),
        ):
            messages: list[str] = []
            monkeypatch.setattr("mpitrain.early.log", messages.append)
            config = read()
            assert getattr(getattr(config, our_section), name) == value
            assert messages == [f"{origin}: {theirs} is called {ours} here"]
    Config.from_args([str(file), "--model.width", "32"])  # flags win over a file, whatever its words
    with pytest.raises(InputError, match=r"train.num_epochs and train.epochs are the same setting; give one"):
        Config.from_dict({"train": {"epochs": 1, "num_epochs": 2}})


def test_epochs_on_the_command_line_replace_steps_in_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[train]\nsteps = 50\nmicrobatch = 4\n")
    config = Config.from_args([str(file), "--train.epochs", "2", "--train.accumulation", "3"])
    file.write_text(config.to_toml())
    assert Config.from_args([str(file)]) == config and config.train.epochs == 2.0
    longer = Config.from_args([str(file), "--train.steps", "9", "--train.microbatch", "2"])
    assert (longer.train.steps, longer.train.epochs, longer.train.microbatch) == (9, 0.0, 2)


def test_later_arguments_override_earlier_ones_and_the_file(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text("[train]\nsteps = 5\nbatch = 7\n[optim.options]\nbetas = [0.8, 0.9]\n")
    config = Config.from_args([str(file), "--train.steps=6", "--train.steps", "8", "--run.dir", "123"])
    assert (config.train.steps, config.train.batch, config.run.dir) == (8, 7, "123")
    assert config.optim.options == {"betas": [0.8, 0.9]}


def test_flags_override_a_file_that_follows_them(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 5\nbatch = 7\n")
    config = Config.from_args(["--train.steps", "3", str(file), "--train.clip=0"])
    assert (config.train.steps, config.train.batch, config.train.clip) == (3, 7, 0.0)


def test_error_about_a_wrong_value_names_its_flag_or_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 5\n")
    with pytest.raises(InputError, match=r"^command line: train\.batch = 'many' is wrong"):
        Config.from_args([str(file), "--train.batch", "many"])
    file.write_text("[train]\nsteps = -5\n")
    with pytest.raises(InputError, match=r"^\S+my\.toml: train\.steps = -5 is wrong"):
        Config.from_args([str(file), "--train.batch", "4"])


@pytest.mark.parametrize("text", ['{"a": 1, "b": {"c": [true, null]}}', '{ "a" :1,\n"b":{"c":[true,null]}}'])
def test_a_dictionary_may_be_json_or_toml(text):
    assert Config.from_args(["--model.options", text]).model.options == {"a": 1, "b": {"c": [True, None]}}
    toml = Config.from_args(["--optim.options", "{a = 1, b = {c = [true]}}"])
    assert toml.optim.options == {"a": 1, "b": {"c": [True]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train = 3\n", "train is a section; write [train] and under it its keys, such as steps"),
        ("steps = 3\n", "unknown key 'steps'; did you mean 'train.steps'?"),
        ("'train.steps' = 3\n", "'train.steps' is key 'steps' of section 'train'; write [train] and steps under it"),
        ("[train]\nlr = 0.1\n", "unknown key 'train.lr'; did you mean 'optim.lr'?"),
        ("[optimizer]\nlr = 0.1\n", "unknown key 'optimizer'; did you mean 'optim'?"),
        ("[trainer.optim]\nlr = 0.1\n", "did you mean 'train'?"),
        ("[lightning]\ndropout = 0.1\n", "unknown key 'lightning.dropout'; did you mean 'model.dropout'?"),
    ],
)
def test_error_about_a_wrong_section_or_key_suggests_the_right_one(tmp_path, content, message):
    file = tmp_path / "my.toml"
    file.write_text(content)
    with pytest.raises(InputError) as caught:
        Config.from_args([str(file)])
    assert str(caught.value) == f"{file}: {message}" or str(caught.value).endswith(message)


@pytest.mark.parametrize(
    "values", [{3: {}}, {"train": {4: 1}}, {"": {}}, {"train": None}, {"train": {"": 1}}, {"a.b": 1}]
)
def test_invalid_names_are_refused_in_one_line(values):
    with pytest.raises(InputError, match=r"^config: [^\n]*$"):
        Config.from_dict(values)


def test_error_about_a_removed_setting_names_its_replacement(tmp_path, monkeypatch):
    file = tmp_path / "my.toml"
    keys = sections()
    for name, (empty, instead) in REMOVED.items():
        section, _, key = name.partition(".")
        assert key not in keys[section] and re.search(r"\b\w+\.\w+\b", instead)
        file.write_text(f'[{section}]\n{key} = "steps.json"\n')
        dotted = tmp_path / "dotted.toml"
        dotted.write_text(f'"{name}" = "steps.json"\n')
        for origin, read in {
            "command line": lambda name=name: Config.from_args([f"--{name}", "steps.json"]),
            str(file): lambda: Config.from_args([str(file)]),
            str(dotted): lambda dotted=dotted: Config.from_args([str(dotted)]),
            "config": lambda section=section, key=key: Config.from_dict({section: {key: "steps.json"}}),
        }.items():
            with pytest.raises(InputError, match=f"^{re.escape(f'{origin}: {name} was removed: {instead}')}$"):
                read()
        messages: list[str] = []  # the resolved settings of earlier runs name it
        monkeypatch.setattr("mpitrain.early.log", messages.append)
        assert Config.from_dict({section: {key: empty}}) == Config() and not messages


def test_aliases_are_unique_and_differ_from_our_keys():
    words = [word for settings in sections().values() for field in settings.values() for word in other_names(field)]
    keys = {key for settings in sections().values() for key in settings}
    assert len(words) == len(set(words)) and not keys & set(words)


def test_a_configuration_is_read_without_torch_and_mpi():
    code = (
        "import sys; from mpitrain.config.settings import Config; import mpitrain.config.deepspeed;"
        "assert Config.from_args(['--comm.timeout', '7']).comm.timeout == 7.0;"
        "print([name for name in ('torch', 'mpi4py', 'h5py', 'numpy') if name in sys.modules])"
    )
    assert job(0, [sys.executable, "-c", code]).stdout == "[]\n"


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    cut = ["--parallel.cut", "[5, 7]", "--parallel.tensor", "2", "--parallel.whole", '["*.mlp.*"]']
    config = Config.from_args(["--model.options", "{depth = 3}", "--parallel.data", "4", *cut])
    assert config.parallel.cut == (5, 7) and config.parallel.whole == ("*.mlp.*",)
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert Config.from_args([str(file)]) == config


@pytest.mark.parametrize("content", ["[train\n", "[nonsense]\nx = 1\n", "train = 3\n", "[train]\nstep = 3\n"])
def test_error_names_the_configuration_file(tmp_path, content):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(InputError, match=r"bad\.toml"):
        Config.from_args([str(file)])


def test_help_lists_every_key_with_its_choices():
    text = help_text("mpitrain.train")
    assert all(f"--{section}.{key} " in text for section, settings in sections().items() for key in settings)
    assert "[none]" in next(line for line in text.splitlines() if "--train.metrics " in line) and "[[]]" not in text
    assert 'of your own: gpipe, 1f1b, interleaved, zero-bubble ["1f1b"]' in text


def test_invalid_configuration_files_are_refused_in_one_line(tmp_path):
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


def test_tables_on_the_command_line_may_be_toml_or_json():
    for text in ('{"betas": [0.9, 0.95]}', "{betas = [0.9, 0.95]}"):
        assert Config.from_args(["--optim.options", text]).optim.options == {"betas": [0.9, 0.95]}
    for text in ('[{"match": "*.bias", "lr_scale": 2}]', '[{match = "*.bias", lr_scale = 2}]'):
        assert Config.from_args([f"--optim.groups={text}"]).optim.groups == [{"match": "*.bias", "lr_scale": 2}]
    assert Config.from_args(["--optim.groups", "[]"]).optim.groups == []
    for flag, value, fix in (
        ("--optim.options", "betas=0.9", r'write {a = 1} or {"a": 1}'),
        ("--optim.groups", "{match = 'a', lr = 1}", "write [{a = 1}]"),
    ):
        with pytest.raises(InputError, match=f"command line: {flag[2:]} = .* is wrong") as caught:
            Config.from_args([flag, value])
        assert str(caught.value).endswith(fix)

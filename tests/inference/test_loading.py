"""Models loaded from run folders without MPI, also if a checkpoint does not describe them; text and predictions."""

from __future__ import annotations

import json
import shlex
import shutil
import textwrap
import warnings
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from PIL import Image
from support import one_line

from mpitrain.checkpoint import contents
from mpitrain.checkpoint.manifest import encode, read_manifest
from mpitrain.data.decoding import read_image
from mpitrain.errors import CheckpointError, InputError
from mpitrain.inference import inputs
from mpitrain.loading import TASK, load_model, load_task

FACTORY = textwrap.dedent("""
    import torch
    from torch import nn

    def build(data, width):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10)), (
            nn.functional.cross_entropy
        )

    class Running(nn.Module):  # a model of tokens that does not say what its blocks are
        def __init__(self, vocabulary):
            super().__init__()
            self.rows, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

        def forward(self, x):
            return self.head(self.rows(x).cumsum(1))

        def loss(self, output, y):
            return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())

    def running(data):
        return Running(data.vocabulary)
""")
TABLE = "age,colour,city,kind\n" + "31.5,green,Bergen,yes\n,red,Pisa,no\n28,red,Lyon,yes\n" * 4
KINDS = {
    "own": "--data.path digits --model.factory own_models:build --model.options {width=5}",
    "text": "--data.path text --model.layers 1 --model.width 16 --model.heads 2 --model.sequence 8",
    "people": "--data.path table --model.name mlp --model.width 4 --checkpoint.best held_out_loss --optim.lr 0.1",
    "adapted": "--data.path text --model.width 16 --model.layers 1 --model.heads 2 --model.sequence 8 --model.lora 2",
    "on_text": "--data.path text --model.base text --model.lora 2 --optim.lr 0.1",
    "seen": "--data.path pixels --model.name mlp --model.width 4",
    "running": "--data.path text --model.factory own_models:running --model.sequence 8",
}


@pytest.fixture(scope="module")
def runs_folder(forked, tmp_path_factory) -> Path:
    """A folder with a run of each kind, and an mpi4py that cannot be imported: its commands run without MPI."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own_models.py").write_text(FACTORY)
    (folder / "words.txt").write_text("All happy families are alike.\n" * 100)
    assert forked.run("data", "prepare", "words.txt", "--out", "text", cwd=folder).returncode == 0
    (folder / "people.csv").write_text(TABLE)
    how = "people.csv --out table --label kind --drop city --missing mean --categories onehot --held-out 0.3"
    assert forked.run("data", "prepare", *how.split(), cwd=folder).returncode == 0
    for number in range(12):
        image = folder / "pictures" / ("cats", "dogs")[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8 + number % 3, 3), np.uint8)
        Image.fromarray(pixels).save(image)
    assert forked.run("data", "prepare", *["pictures", "--size", "8", "--out", "pixels"], cwd=folder).returncode == 0
    for name, words in KINDS.items():
        steps = "--train.steps 2 --train.batch 4 --train.evaluate_samples 4 --checkpoint.every 1"
        done = forked.run("train", *f"--run.dir {name} {steps} {words}".split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "without").mkdir()
    (folder / "without/mpi4py.py").write_text("raise ModuleNotFoundError('no mpi4py')\n")
    return folder


@pytest.fixture
def command(runs_folder, monkeypatch, capfd):
    """Return a function that runs a command line in the folder of the runs, with exit code, stdout and stderr."""
    monkeypatch.chdir(runs_folder)
    monkeypatch.syspath_prepend(runs_folder)

    def call(words: str) -> CompletedProcess[str]:
        name, *rest = shlex.split(words)
        code = import_module(f"mpitrain.{name}").main(rest)
        return CompletedProcess(words, code, *capfd.readouterr())

    return call


LOOK = """
import sys
sys.path.insert(0, ".")
import h5py, torch
import mpitrain as mt
import mpitrain.generate, mpitrain.predict
for name in {names}:
    model = mt.load_model(name)
    with h5py.File(f"{{name}}/checkpoints/step-00000002/model.h5") as stored:
        for key, tensor in model.state_dict().items():
            if name in ("adapted", "on_text") and ".lora_" not in key:
                continue  # drawn with run.seed again, or of model.base, and not stored
            assert torch.equal(tensor, torch.as_tensor(stored[key][()])), key
    assert not any(module.training for module in model.modules())
    assert next(model.parameters()).dtype == torch.float32 and next(model.parameters()).is_cpu
assert mpitrain.generate.main(["text", "--prompt", "a", "--tokens", "1"]) == 0
assert mpitrain.predict.main(["text", "text", "--out", "without.csv"]) == 0
assert not [name for name in sys.modules if name.startswith("mpi4py")]
print("all")
"""


def test_a_model_is_rebuilt_with_its_weights_and_without_mpi(forked, runs_folder):
    done = forked.run("-c", LOOK.format(names=list(KINDS)), cwd=runs_folder, PYTHONPATH=str(runs_folder / "without"))
    assert (done.stdout[-4:], done.returncode) == ("all\n", 0), done.stderr


def test_adapters_on_a_run_are_merged_into_its_weights_and_refused_without_them(runs_folder, forked, command, tmp_path):
    assert "2 adapters of on_text merged" in command(f"adapters merge on_text {tmp_path / 'whole.pt'}").stdout
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    base, tuned = load_model("text"), load_model("on_text")
    assert torch.equal(whole["blocks.0.mlp.up.weight"], base.state_dict()["blocks.0.mlp.up.weight"])
    base.load_state_dict(whole)
    x = torch.arange(8).view(1, 8)
    torch.testing.assert_close(base(x), tuned(x))
    assert not torch.allclose(base(x), load_model("text")(x), atol=1e-3)
    assert command("generate on_text --prompt All --tokens 2").returncode == 0
    assert forked.run("evaluate", "on_text", "--samples", "4", cwd=runs_folder).returncode == 0
    again = ["train", "--run.dir", "on_text", "--train.batch", "4", "--data.path", "text", "--model.lora", "2"]
    for base, message in {
        "text/checkpoints/step-00000001": "for other base weights than those of model.base",
        "nowhere": "model.base: nowhere does not exist; give",
        "on_text": "contains only adapters; merge them",
    }.items():
        one_line(forked.run(*again, "--model.base", base, cwd=runs_folder), message)
    (runs_folder / "text").rename(runs_folder / "away")
    try:
        one_line(command("adapters merge on_text again.pt"), "model.base: text does not exist; give the path of a")
    finally:
        (runs_folder / "away").rename(runs_folder / "text")


def copy_with_changes(run: Path, out: Path, **changes) -> Path:
    """Copy a run and change the values of its checkpoints; None removes a value."""
    shutil.copytree(run, out, symlinks=True)
    for folder in (out / "checkpoints").glob("step-*"):
        manifest = read_manifest(folder)
        for name, value in changes.items():
            manifest.values[name] = value
            if value is None:
                del manifest.values[name]
        (folder / "manifest.json").write_bytes(encode(manifest))
    return out


def test_an_old_checkpoint_takes_its_model_from_the_run(runs_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(runs_folder)
    run = copy_with_changes(runs_folder / "text", tmp_path / "old", **{TASK: None})
    for name, tensor in load_model("text").state_dict().items():
        assert torch.equal(tensor, load_model(run).state_dict()[name])
    (run / "config.toml").unlink()
    with pytest.raises(InputError, match=r"does not describe its model.*load_weights"):
        load_model(run)
    strange = copy_with_changes(runs_folder / "text", tmp_path / "strange", **{TASK: {"model": {}}})
    with pytest.raises(CheckpointError, match="is not valid"):
        load_model(strange)


def test_a_run_gives_its_newest_complete_checkpoint_and_a_step_folder_itself(runs_folder, tmp_path):
    run = shutil.copytree(runs_folder / "text", tmp_path / "run", symlinks=True)
    first, last = run / "checkpoints/step-00000001", run / "checkpoints/step-00000002"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = load_model(first).state_dict()
        assert not torch.equal(load_model(run).state_dict()["norm.bias"], expected["norm.bias"])
    manifest = contents.complete_manifest(last)
    extent = manifest.extents_of["model/norm.bias"][0]
    with open(last / extent.file, "r+b") as file:
        file.seek(extent.offset)
        file.write(b"\xff")
    with pytest.warns(UserWarning, match=r"older checkpoint.*step-00000001.*damaged"):
        assert torch.equal(load_model(run).state_dict()["norm.bias"], expected["norm.bias"])
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(last)


def test_text_goes_to_standard_output_and_depends_only_on_the_seed(command, runs_folder):
    first = command("generate text --prompt 'All ' --tokens 20")
    assert first.returncode == 0 and first.stdout.startswith("All ") and first.stderr == ""
    (runs_folder / "prompts.txt").write_text("happy\nAll \n")
    lines = command("generate text --prompts prompts.txt --tokens 20 --out o.jsonl")
    assert (lines.returncode, lines.stdout, lines.stderr) == (0, "", "")
    records = [json.loads(line) for line in (runs_folder / "o.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in records] == ["happy", "All "] and all(one["tokens"] == 20 for one in records)
    assert first.stdout == "All " + records[1]["text"] + "\n"
    other = command("generate running --prompt a --tokens 5 --temperature 0")
    assert other.returncode == 0 and other.stdout.startswith("a")
    messages = [line for line in other.stderr.splitlines() if line]
    assert len(messages) == 1 and "Running" in messages[0] and "computed again" in messages[0]


def test_predictions_equal_the_model_output_in_every_file_format(command):
    model, (task, description) = load_model("own"), load_task("own")
    x = np.random.default_rng(1).random((9, 1, 8, 8), np.float32)
    np.save("x.npy", x)
    for ending in ("csv", "jsonl", "npz"):
        done = command(f"predict own x.npy --out p.{ending} --batch 4")
        assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = torch.softmax(model(torch.from_numpy(x)).double(), 1).numpy()
    names = [description.classes[n] for n in expected.argmax(1)]
    table = [line.split(",") for line in Path("p.csv").read_text().splitlines()]
    assert table[0] == ["sample", "class", *description.classes]
    assert [row[:2] for row in table[1:]] == [[str(n), name] for n, name in enumerate(names)]
    assert np.array([row[2:] for row in table[1:]], float) == pytest.approx(expected, rel=1e-6)
    lines = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [line["class"] for line in lines] == names
    assert [list(line["probabilities"].values()) for line in lines] == [list(map(float, row[2:])) for row in table[1:]]
    done = command("predict text text --out t.npz")
    assert done.returncode == 0, done.stderr
    from mpitrain.data import open_dataset

    task, _ = load_task("text")
    x, y = map(torch.from_numpy, open_dataset("text", sequence=8).read(np.arange(3)))
    with torch.no_grad(), np.load("t.npz") as arrays:
        expected = [-8 * float(task.loss(task.module(x[n : n + 1]), y[n : n + 1])) for n in range(3)]
        assert arrays["log_probability"][:3] == pytest.approx(expected, rel=1e-5) and set(arrays["tokens"]) == {8}


def test_a_table_is_converted_as_in_training(command, runs_folder):
    """Texts become the categories of the training and gaps its fill value, for any order of rows and columns."""
    (runs_folder / "new.csv").write_text("colour,note,age\nred,a,40\ngreen,b,\n")
    model, description = load_model("people"), load_task("people")[1]
    fill = description.columns[0].fill
    assert description.columns[1].categories == ("green", "red") and 28 < fill < 31.5
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[40.0, 0, 1], [fill, 1, 0]])).double(), 1).numpy()
    done = command("predict people new.csv --out new.npz")
    assert done.returncode == 0, done.stderr
    with np.load("new.npz") as predictions:
        assert predictions["probabilities"] == pytest.approx(expected, rel=1e-6)
        assert list(predictions["classes"]) == ["no", "yes"]
    (runs_folder / "odd.csv").write_text("colour,age\nblue,40\nred,40\ngreen,old\ngreen,\n")
    one_line(command("predict people odd.csv --out q.csv"), "line 2, column colour", "'blue' is not among", "'green'")
    done = command("predict people odd.csv --skip-bad --batch 1 --out odd.jsonl")
    message = "left out 2 rows that do not fit, such as odd.csv, line 2, column colour: 'blue' is not among"
    assert done.returncode == 0 and message in done.stderr and "2 samples in odd.jsonl" in done.stderr
    predictions = [json.loads(line) for line in (runs_folder / "odd.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in predictions] == [1, 3]
    assert [list(line["probabilities"].values()) for line in predictions] == [
        pytest.approx(row, rel=1e-6) for row in expected
    ]
    (runs_folder / "ragged.csv").write_text("id,colour,age\nx1,red,40\nx2,green\nx3,blue,40\nx4,green,\n")
    one_line(command("predict people ragged.csv --out q.csv"), "line 3: 2 columns where", "--skip-bad")
    for out in ("kept.csv", "kept.jsonl", "kept.npz"):
        done = command(f"predict people ragged.csv --skip-bad --keep id --out {out}")
        assert done.returncode == 0 and "left out 2 rows that do not fit" in done.stderr, done.stderr
    rows = [line.split(",")[:2] for line in (runs_folder / "kept.csv").read_text().splitlines()]
    assert rows == [["sample", "id"], ["0", "x1"], ["3", "x4"]]
    assert [json.loads(line)["id"] for line in (runs_folder / "kept.jsonl").read_text().splitlines()] == ["x1", "x4"]
    with np.load("kept.npz") as arrays:
        assert arrays["id"].tolist() == ["x1", "x4"] and arrays["probabilities"] == pytest.approx(expected, rel=1e-6)
    one_line(command("predict people ragged.csv --skip-bad --keep size --out q.csv"), "no column size, which --keep")
    one_line(command("predict people --keep id new.npz --out q.csv"), "--keep id is for columns of a table")
    (runs_folder / "odder.csv").write_text("colour,age\nblue,40\n")
    one_line(command("predict people odder.csv --skip-bad --out q.csv"), "has only rows that do not fit")
    (runs_folder / "lacking.csv").write_text("colour,size\nred,40\n")
    one_line(command("predict people lacking.csv --out q.csv"), "has no column age")


def test_images_are_converted_as_in_training_and_bad_ones_skipped_on_request(
    command, runs_folder, tmp_path, monkeypatch
):
    def rows(out, *, named):
        lines = (tmp_path / out).read_text().splitlines()[1:]
        return sorted([float(cell) for cell in line.split(",")[2:]] for line in lines), [
            line.split(",")[0] for line in lines if named
        ]

    assert command(f"predict seen pictures --out {tmp_path / 'files.csv'}").returncode == 0
    assert command(f"predict seen pixels --out {tmp_path / 'set.csv'}").returncode == 0
    values, names = rows("files.csv", named=True)
    np.testing.assert_allclose(values, rows("set.csv", named=False)[0], rtol=1e-5)
    (runs_folder / "pictures/dogs/0.png").write_bytes((runs_folder / "pictures/dogs/1.png").read_bytes()[:60])
    one_line(command(f"predict seen pictures --out {tmp_path / 'again.csv'}"), "dogs/0.png cannot be decoded")
    read: list[Path] = []
    monkeypatch.setattr(
        inputs, "read_image", lambda path, *of, **how: read.append(path) or read_image(path, *of, **how)
    )
    done = command(f"predict seen pictures --skip-bad --batch 5 --out {tmp_path / 'again.csv'}")
    assert len(read) == len(set(read)) == 13
    assert done.returncode == 0 and "left out 1 images that cannot be read, such as pictures/dogs/0.png" in done.stderr
    again, again_names = rows("again.csv", named=True)
    assert again_names == names and names[0] == "cats/0.png"
    np.testing.assert_allclose(again, values, rtol=1e-5)  # batches of other sizes are rounded otherwise


def test_best_selects_the_best_checkpoint(command, runs_folder, tmp_path):
    run = shutil.copytree(runs_folder / "people", tmp_path / "run", symlinks=True)
    (run / "checkpoints/best").write_text("step-00000001\n")
    expected = load_model(run / "checkpoints/step-00000001").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_model(run, best=True).state_dict().items())
    assert not torch.equal(load_model(run).state_dict()["head.weight"], expected["head.weight"])
    for name, words in (("best", f"{run} table --best"), ("first", f"{run}/checkpoints/step-00000001 table")):
        assert command(f"predict {words} --out {tmp_path}/{name}.jsonl").returncode == 0
    assert (tmp_path / "best.jsonl").read_text() == (tmp_path / "first.jsonl").read_text()
    one_line(command("generate text --prompt a --best"), "no checkpoint that is marked as the best")


def test_log_probabilities_match_the_loss_and_exclude_the_prompt(command, runs_folder):
    (runs_folder / "lines.txt").write_text("All happy\nare\n")
    (runs_folder / "pairs.jsonl").write_text('{"question": "All", "completion": " happ"}\n')
    task, _ = load_task("text")

    def cost(text, first):
        tokens = torch.tensor([list(text.encode())])
        with torch.no_grad():
            scores = torch.log_softmax(task.module(tokens[:, :-1])[0].double(), 1)
        return sum(float(scores[at - 1, tokens[0, at]]) for at in range(first, tokens.shape[1]))

    done = command("predict text lines.txt --out lines.npz")
    assert done.returncode == 0, done.stderr
    with np.load("lines.npz") as arrays:
        assert arrays["log_probability"] == pytest.approx([cost("All happy", 1), cost("are", 1)], rel=1e-5)
        assert list(arrays["tokens"]) == [8, 2]
    done = command("predict text pairs.jsonl --prompt question --out pairs.npz")
    assert done.returncode == 0, done.stderr
    with np.load("pairs.npz") as arrays:
        assert (arrays["log_probability"][0], arrays["tokens"][0]) == (pytest.approx(cost("All happ", 3), rel=1e-5), 5)


def test_a_checkpoint_with_more_tensors_than_the_model_has_is_refused(runs_folder, tmp_path):
    task = read_manifest(runs_folder / "text/checkpoints/step-00000002").values[TASK]
    fewer = task | {"model": task["model"] | {"bias": False}}
    with pytest.raises(CheckpointError, match=r"has blocks\.0\.attention\.out\.bias, which GPT does not have"):
        load_model(copy_with_changes(runs_folder / "text", tmp_path / "fewer", **{TASK: fewer}))


REFUSED = [
    ("generate nowhere --prompt a", "nowhere does not exist"),
    ("generate empty --prompt a", "has no checkpoint yet"),
    ("generate own --prompt a", "not on text"),
    ("generate text", "use --prompt"),
    ("generate text --prompt a --top-p 2", "--top-p 2"),
    ("generate text --prompt a --out x.npy", "x.npy exists already"),
    ("predict own text --out q.csv", "has tokens"),
    ("predict own wide.npy --out q.csv", "[3, 8, 8]", "[1, 8, 8]"),
    ("predict own x.txt --out q.csv", "no samples that predict can read"),
    ("predict own few.csv --out q.csv", "line 2", "'a' is not a number"),
    ("predict own few.npy --out q.xml", "use .csv, .jsonl or .npz"),
    ("predict text few.csv --out q.csv", "tokens"),
    ("predict text long.txt --out q.csv", "text 1 has 10 tokens", "a sample of this model has 9"),
    ("predict text long.jsonl --out q.csv", "no field 'text'"),
]


def test_impossible_requests_are_reported_in_one_line_and_leave_no_file(command, runs_folder, capfd):
    (runs_folder / "empty").mkdir()
    (runs_folder / "empty/config.toml").write_text("")
    for shape, name in (((2, 3, 8, 8), "wide"), ((2, 1, 8, 8), "few"), ((2,), "x")):
        np.save(runs_folder / name, np.zeros(shape, np.float32))
    (runs_folder / "x.txt").write_text("words")
    (runs_folder / "long.txt").write_text("All happy.\n")
    (runs_folder / "long.jsonl").write_text('{"words": "a"}\n')
    (runs_folder / "few.csv").write_text("b,c\na,1\n")
    for refused, *words in REFUSED:
        one_line(command(refused), *words)
    with pytest.raises(SystemExit, match="2"):
        command("generate text --prompt a --tokens 0 --out q.jsonl")
    assert capfd.readouterr().err.endswith("error: argument --tokens: '0' is not a whole number above 0\n")
    assert not list(runs_folder.glob("*q.*"))


def write_hostile_run(runs_folder: Path, run: Path, factory: str) -> Path:
    """Write a run whose manifests and settings name code in its folder; the code prints a line if it runs."""
    task = read_manifest(runs_folder / "running/checkpoints/step-00000002").values[TASK]
    copy_with_changes(runs_folder / "running", run, **{TASK: task | {"model": task["model"] | {"factory": factory}}})
    settings = run / "config.toml"
    settings.write_text(settings.read_text().replace("own_models:running", factory))
    (run / "evil.py").write_text(f"print('evil ran')\n{FACTORY}\nbuild = running\n")
    return run


OPENED = "import sys, mpitrain as mt; print(type(mt.load_model({run!r}{more})).__name__)"


@pytest.mark.parametrize("factory", ["evil:build", "given.evil:build"], ids=["module", "package"])
def test_code_in_a_run_folder_runs_only_if_trusted(runs_folder, forked, tmp_path, factory):
    run = write_hostile_run(runs_folder, tmp_path / "given", factory)
    cwd = run if factory.startswith("evil") else tmp_path
    words = f"would import {factory[:-6]} from {run}/evil.py", "--trust (in Python trust=True)"
    data = str(runs_folder / "text")
    done = forked.run("-c", OPENED.format(run=str(run), more=""), cwd=cwd)
    assert done.returncode == 1 and all(word in done.stderr for word in words) and "evil ran" not in done.stdout
    opening = {
        "generate": [run, "--prompt", "a", "--tokens", "1"],
        "predict": [run, data, "--out", tmp_path / "p.csv"],
        "evaluate": [run, "--data", data, "--samples", "4"],
    }
    for name, arguments in opening.items():
        refused = forked.run(name, *arguments, cwd=cwd)
        one_line(refused, *words)
        assert "evil ran" not in refused.stdout
        trusted = forked.run(name, *arguments, "--trust", cwd=cwd)
        assert trusted.returncode == 0 and "evil ran" in trusted.stdout, trusted.stderr
    done = forked.run("-c", OPENED.format(run=str(run), more=", trust=True"), cwd=cwd)
    assert done.stdout.split("\n")[:2] == ["evil ran", "Running"], done.stderr


def test_reading_or_resuming_a_run_imports_no_module_that_it_names(runs_folder, forked, tmp_path):
    run = write_hostile_run(runs_folder, tmp_path / "given", "evil:build")
    for words in (f"show {run}", f"verify {run}", f"export {run} {tmp_path}/w.pt", f"ls {run}"):
        done = forked.run("checkpoint", *words.split(), cwd=run)
        assert done.returncode == 0 and "evil ran" not in done.stdout, done.stderr
    settings = f"--data.path {runs_folder}/text --model.factory own_models:running --model.sequence 8 --train.batch 4"
    more = f"--run.dir {tmp_path}/on --train.steps 3 --checkpoint.resume {run}/checkpoints/step-00000002"
    done = forked.run("train", *f"{settings} {more}".split(), cwd=run, PYTHONPATH=str(runs_folder))
    assert done.returncode == 0 and "evil ran" not in done.stdout, done.stderr


def test_an_importable_module_is_preferred_to_the_run_folder(runs_folder, forked, tmp_path):
    run = write_hostile_run(runs_folder, tmp_path / "given", "evil:build")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/evil.py").write_text(f"{FACTORY}\nbuild = running\n")
    done = forked.run("-c", OPENED.format(run=str(run), more=""), cwd=run, PYTHONPATH=str(tmp_path / "mine"))
    assert (done.stdout, done.returncode) == ("Running\n", 0), done.stderr
    run = write_hostile_run(runs_folder, tmp_path / "library", "unittest:main")  # it imports what its arguments name
    (run / "evil.py").rename(run / "test_evil.py")
    one_line(
        forked.run("generate", run, "--prompt", "a", cwd=runs_folder),
        "names unittest of Python's standard library",
        "--trust",
    )

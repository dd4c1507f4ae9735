"""Every example does what its docstring promises, at several numbers of ranks and from any working folder."""

from __future__ import annotations

import importlib.util
import math
import re
import sys

import pytest
import support
import torch
from support import ROOT, one_line
from warm import job

import mpitrain as mt
from mpitrain.data import open_dataset

EXAMPLES = ROOT / "examples"
QUICK = {  # a few steps of each
    "pi.py": ["--blocks", "4"],
    "ring.py": [],
    "ddp.py": ["--steps", "3"],
    "engine.py": ["--steps", "3"],
    "mesh.py": ["--steps", "2"],
    "images.py": ["--steps", "2"],
    "finetune_hf.py": ["--steps", "2"],
    "deepspeed_config/train.py": ["--steps", "2"],
}
TRAINING = [name for name in QUICK if name not in ("pi.py", "ring.py")]


def load(name):
    """Load an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name.replace('/', '_')}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(world, capsys, module, *arguments):
    """Run an example, and return its output on every rank."""
    capsys.readouterr()
    module.main([str(argument) for argument in arguments])
    mine = capsys.readouterr().out
    assert world.rank == 0 or not mine
    return world.broadcast_object(mine)


def numbers_in(pattern, text):
    """Return the numbers that a pattern matches, in order."""
    return [float(number.rstrip("%")) for number in re.findall(pattern, text)]


def run_on_one_rank(world, act):
    """Call act(communicator of one rank) on rank 0 alone, and return its result on every rank."""
    alone = world.subgroup([0])
    result = None
    if alone is not None:
        result = act(alone)
        alone.free()
    return world.broadcast_object(result)


def ignore(text):
    pass


@pytest.mark.ranks(1, 3)
def test_pi_example_counts_the_same_points_on_any_number_of_ranks(world, capsys):
    pi = load("pi")
    assert pi.estimate(world, 7) == run_on_one_rank(world, lambda alone: pi.estimate(alone, 7))
    printed = output_of(world, capsys, pi)
    value, error, typical = (
        float(re.search(text, printed)[1]) for text in (r"about (.*)", r"error (.*);", r"is (0.*)")
    )
    assert error == pytest.approx(abs(value - math.pi), abs=2e-6) and error < 4 * typical


@pytest.mark.ranks(1, 2, 3)
def test_ring_example_sums_as_all_reduce_does(world, capsys):
    ring = load("ring")
    n = world.size
    assert ring.pass_token(world) == (n * (n + 1) // 2 if world.rank == 0 else 1 + world.rank * (world.rank + 3) // 2)
    x = torch.arange(5.0) * (world.rank + 1)
    assert ring.sum_by_ring(world, x).tolist() == [n * (n + 1) // 2 * i for i in range(5)]
    assert x.tolist() == [(world.rank + 1) * i for i in range(5)]
    assert f"the token came back to rank 0 as {n * (n + 1) // 2}, from {n} ranks" in output_of(world, capsys, ring)


@pytest.mark.ranks(3)
def test_ddp_example_matches_the_losses_of_one_rank(world, capsys):
    ddp = load("ddp")
    printed = output_of(world, capsys, ddp, "--steps", 60)
    losses = numbers_in(r"loss ([\d.]+)", printed)
    assert len(losses) == 3 and losses[-1] < 0.75 * losses[0]
    assert numbers_in(r"([\d.]+%) of the points", printed)[0] > 70
    _, several = ddp.train(world, 25, ignore)  # into the second epoch
    assert several == pytest.approx(run_on_one_rank(world, lambda alone: ddp.train(alone, 25, ignore)[1]), rel=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 3, *(pytest.param(stage, marks=pytest.mark.campaign) for stage in (1, 2))])
def test_engine_example_resumes_bit_by_bit_and_its_memory_matches_the_formula(world, folder, capsys, zero):
    engine = load("engine")
    whole = output_of(world, capsys, engine, "--zero", zero, "--steps", 20)
    output_of(world, capsys, engine, "--zero", zero, "--steps", 10, "--save", folder / "kept")
    resumed = output_of(world, capsys, engine, "--zero", zero, "--steps", 20, "--save", folder / "kept", "--resume")
    assert re.findall(r"parameters (\w{16})", whole) == re.findall(r"parameters (\w{16})", resumed)
    assert "continuing after step 10, where the loss was" in resumed
    losses = numbers_in(r"loss ([\d.]+) ", whole)
    assert losses[-1] < 0.8 * losses[0]
    rows = re.findall(r"(parameters|gradients|states) +([\d.]+) +([\d.]+)", whole)
    assert len(rows) == 3
    for kind, counted, formula in rows:
        assert float(counted) == pytest.approx(float(formula), rel=0.01), kind


@pytest.mark.ranks(3)
@pytest.mark.parametrize("share_node", [False, True])
def test_engine_example_matches_the_losses_of_one_rank(world, share_node):
    engine = load("engine")

    def steps(comm):
        training_engine = engine.make_engine(comm, 3, share_node)
        losses = [engine.train_step(training_engine, comm) for _ in range(4)]
        training_engine.close()
        return losses

    assert steps(world) == pytest.approx(run_on_one_rank(world, steps), rel=1e-5)


def mesh_on_one_process(mesh, steps):
    """Return the losses of plain PyTorch in one process."""
    torch.manual_seed(0)
    model = mesh.Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        x, y = mesh.samples(step)
        h = x
        for _, block in model.pipeline_blocks():
            h = block(h)
        loss = mesh.cross_entropy(h, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(2, 4)
def test_mesh_example_matches_one_process_on_four_meshes(world, capsys):
    mesh = load("mesh")
    expected = mesh_on_one_process(mesh, 6)
    n = world.size
    shapes = {2: [(2, 1), (1, 2), (1, 1)], 4: [(2, 2)]}[n]
    for number, (pipeline, tensor) in enumerate(shapes):
        axes = mt.Mesh.make(world, pipeline=pipeline, tensor=tensor)
        schedule = ("1f1b", "zero-bubble", "gpipe")[number]
        assert mesh.train(axes, 6, schedule, ignore) == pytest.approx(expected, rel=1e-5), (pipeline, tensor)
        axes.free()
    if n > 2:
        return
    pipeline, tensor = shapes[0]
    printed = output_of(world, capsys, mesh, "--steps", 20, "--pipeline", pipeline, "--tensor", tensor)
    assert f"{n // pipeline // tensor} x {pipeline} x {tensor} ranks along data, pipeline, tensor" in printed
    losses = numbers_in(r"loss ([\d.]+)", printed)
    assert len(losses) == 2 and losses[1] < losses[0] - 0.2


@pytest.mark.ranks(2, 3)
def test_images_example_classifies_held_out_digits(world, folder, capsys, monkeypatch):
    images = load("images")
    monkeypatch.chdir(folder)
    printed = output_of(world, capsys, images, "--steps", 40)
    assert "1617 images of (1, 8, 8), and 180 held out" in printed and (folder / "data/digits").is_dir()
    assert numbers_in(r"accuracy ([\d.]+%)", printed)[0] > 85
    data = open_dataset("digits")
    _, several = images.train(world, data, 10, ignore)
    assert several == pytest.approx(
        run_on_one_rank(world, lambda alone: images.train(alone, data, 10, ignore)[1]), rel=1e-4
    )


def save_with_tokenizer(folder, text):
    """Save a tiny GPT-2 in the format of Hugging Face, with a tokenizer trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.campaign), 3])
def test_transformers_loads_the_fine_tuned_model(world, folder, capsys, zero):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tune = load("finetune_hf")
    printed = output_of(world, capsys, tune, "--steps", 20, "--zero", zero, "--out", folder / "tuned")
    first, last = map(float, re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert last < 0.8 * first
    model = AutoModelForCausalLM.from_pretrained(folder / "tuned", local_files_only=True)
    assert model.lm_head.weight is model.transformer.wte.weight
    _, _, tokens = tune.load(None, tune.Path(tune.argparse.__file__).read_text(encoding="utf-8"))
    held_out = tokens[int(len(tokens) * 0.9) :]
    x = tune.pieces(held_out, torch.arange(0, 48 * 64, 64))
    with torch.no_grad():
        assert model(input_ids=x, labels=x).loss.item() == pytest.approx(last, rel=1e-4)

    text = "to be or not to be, that is the question. " * 200
    if world.rank == 0:
        (folder / "text").write_text(text)
        save_with_tokenizer(folder / "model", text)
    world.barrier()
    arguments = ("--model", folder / "model", "--text", folder / "text", "--steps", 4, "--lr", 0.01, "--zero", zero)
    printed = output_of(world, capsys, tune, *arguments, "--out", folder / "again")
    assert numbers_in(r"loss ([\d.]+)", printed)[-1] < numbers_in(r"loss ([\d.]+)", printed)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder / "again", local_files_only=True)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(folder / "again", local_files_only=True)
    assert model.config.vocab_size == 300


@pytest.mark.ranks(2)
def test_deepspeed_example_matches_the_losses_of_one_rank(world, folder, capsys):
    script = load("deepspeed_config/train")
    printed = output_of(world, capsys, script, "--steps", 40, "--save", folder / "kept")
    assert printed.startswith("without effect here: steps_per_print, wall_clock_breakdown, zero_optimization.overlap")
    losses = numbers_in(r"loss ([\d.]+)", printed)
    assert losses[-1] < 0.4 * losses[0]
    assert "saved step-00000040" in printed

    def steps(comm):
        torch.manual_seed(0)
        engine = mt.initialize(script.Net(), config=EXAMPLES / "deepspeed_config/ds_config.json", comm=comm)
        losses = script.train(engine, comm, 25, ignore)  # into the second epoch
        engine.close()
        return losses

    assert steps(world) == pytest.approx(run_on_one_rank(world, steps), rel=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("pi", ["--blocks", "0"], "--blocks 0 leaves no points"),
        ("ring", ["--length", "0"], "--length 0 leaves no numbers"),
        ("engine", ["--resume", "--save", "nowhere"], "there is no checkpoint in nowhere"),
        ("mesh", ["--pipeline", "3"], "parallel.pipeline 3 .* does not give 2 ranks"),
        ("mesh", ["--schedule", "1b1f"], "1b1f"),
        ("images", ["--data", "nowhere"], "nowhere"),
        ("finetune_hf", ["--text", "nowhere"], "nowhere is not a file"),
        ("finetune_hf", ["--model", "nowhere"], "nowhere has no model with a tokenizer"),
        ("deepspeed_config/train", ["--deepspeed_config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_examples_raise_input_errors_on_all_ranks(world, name, arguments, message):
    with pytest.raises(mt.InputError, match=message) as refused:
        load(name).main(arguments)
    assert "\n" not in str(refused.value)


# -- as commands


def test_every_example_is_tested():
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")} == set(QUICK)


def start(forked, name, *arguments, cwd):
    """Run `python examples/NAME ARGUMENTS` in the folder `cwd`, without mpirun."""
    path = EXAMPLES / name
    code = f"import runpy, sys; sys.argv[0] = {str(path)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return forked.run("-c", code, *arguments, cwd=cwd)


@pytest.mark.parametrize("name", QUICK)
def test_examples_start_without_mpirun_in_another_folder(tmp_path, forked, name):
    result = start(forked, name, *QUICK[name], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    shown = r"step +\d+  loss ([\d.]+)" if name in TRAINING else r"(\d+)"
    assert len(numbers_in(shown, result.stdout)) >= 2, result.stdout


def test_examples_start_under_mpirun_in_another_folder(tmp_path):
    result = job(2, [sys.executable, str(EXAMPLES / "mesh.py"), "--pipeline", "2", *QUICK["mesh.py"]], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 x 2 x 1 ranks" in result.stdout and "step    2  loss" in result.stdout


def test_an_example_reports_an_error_in_one_line(tmp_path, forked):
    one_line(
        start(forked, "engine.py", "--resume", cwd=tmp_path), "--resume continues from a folder; name it with --save"
    )


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", [name if name in ("ddp.py", "mesh.py") else pytest.param(name, marks=pytest.mark.full) for name in TRAINING]
)
def test_examples_print_the_same_on_four_ranks_as_on_one(tmp_path, name):
    outputs = []
    for n in (1, 4):
        result = job(n, [sys.executable, str(EXAMPLES / name), *QUICK[name]], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        outputs.append(numbers_in(r"loss ([\d.]+)", result.stdout))
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4)


# -- docs/examples.md

PAGE = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
RUNS = [block.strip().splitlines() for block in re.findall(r"```console\n(.*?)```", PAGE, re.S)]


def test_the_page_lists_every_example_and_its_commands():
    assert all(f"`examples/{name}`" in PAGE for name in QUICK)
    assert len(RUNS) >= len(QUICK)
    for line, *output in RUNS:
        assert re.match(r"\$ (mpirun -n \d+ )?python examples/[\w/]+\.py", line) and output


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_print_what_it_shows(tmp_path):
    """The commands run in order in one folder. Numbers may differ with machine and Python; hashes are skipped."""
    for line, *output in RUNS:
        words = line.removeprefix("$ ").split()
        ranks = int(words[2]) if words[0] == "mpirun" else 0
        words = words[words.index("python") + 1 :]
        result = (job if ranks else support.job)(
            ranks, [sys.executable, str(ROOT / words[0]), *words[1:]], cwd=tmp_path, timeout=200
        )
        assert result.returncode == 0, result.stderr
        printed = result.stdout.splitlines()
        assert len(printed) == len(output), line
        for theirs, ours in zip(output, printed, strict=True):
            if theirs.startswith("parameters "):
                continue
            number = r"\d+(?:\.\d+)?"
            assert re.sub(number, "N", theirs) == re.sub(number, "N", ours)
            shown = [float(each) for each in re.findall(number, theirs)]
            assert [float(each) for each in re.findall(number, ours)] == pytest.approx(shown, rel=0.25, abs=0.05), ours

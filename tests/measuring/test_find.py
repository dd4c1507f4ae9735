"""Batch and bucket sizes found by short runs, `mpitrain.plan --find-batch` and `--find-bucket`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from warm import command

from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.measuring import find

WORLD = SimpleNamespace(size=2, local_rank=0, all_gather_object=lambda value: [value, value])
OPTIONS = SimpleNamespace(memory=1000.0, quick=False)


@pytest.mark.serial
def test_the_largest_batch_lies_on_the_line_of_memory(monkeypatch):
    tried = []

    def run_steps(world, config, quick, *, train):
        tried.append(train["microbatch"])
        assert train["batch"] == 2 * train["microbatch"]  # on two ranks
        if config.model.width == 64 and train["microbatch"] > 4:
            raise refusal("the data has 10 samples")
        return 0.5 + train["microbatch"], 300 + 50 * train["microbatch"]

    monkeypatch.setattr(find, "run_steps", run_steps)
    result = find.find_batch(WORLD, Config(), OPTIONS)
    assert tried == [1, 2, 4] and result["largest"] == 14 and "a step takes 4.5 s" in result["end"]
    monkeypatch.setattr(find, "_LONG", 100.0)
    result, tried[:] = find.find_batch(WORLD, Config(), OPTIONS), []
    assert [run[0] for run in result["runs"]] == [1, 2, 4, 8] and result["largest"] == 14 and not result["end"]
    few = find.find_batch(WORLD, Config.from_dict({"model": {"width": 64}}), OPTIONS)
    assert len(few["runs"]) == 3 and few["end"] == "the data has 10 samples"
    lines = list(find.show_batch(result))
    assert len(lines) == 6 and "14 samples; fastest here: --train.microbatch 8" in lines[-1]


@pytest.mark.serial
def test_the_fastest_bucket_size_is_named(monkeypatch):
    monkeypatch.setattr(find, "run_steps", lambda *_, comm: (1 + abs(comm["bucket_mb"] - 5), 0))
    result = find.find_bucket(WORLD, Config.from_dict({"comm": {"bucket_mb": 7}}), OPTIONS)
    assert list(find.show_bucket(result))[-1] == "fastest: --comm.bucket_mb 4, 33% less than with 7"
    with pytest.raises(InputError, match="--ranks 2 or more"):
        find.find_bucket(SimpleNamespace(size=1), Config(), OPTIONS)


@pytest.mark.campaign
@pytest.mark.parametrize("which", ["--find-batch", "--find-bucket"])
def test_sizes_are_found_by_runs_of_the_job(tmp_path, which, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--model.layers", "2", "--model.width", "16", "--model.heads", "2", "--model.sequence", "16"]
    done = command("plan", *model, which, "--quick", "--memory", "500MiB", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("largest microbatch in 500 MiB per rank" if which == "--find-batch" else "fastest: --comm") in done.stdout
    assert not list(tmp_path.glob("measured-*"))

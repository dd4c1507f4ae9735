"""A rehearsed rank has the bytes of the real one in every category, refuses what does not fit, and leaves no files."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from support import job, one_line, train_command

from mpitrain.comm.rehearsal import play_rank
from mpitrain.config.settings import Config
from mpitrain.trainer.rehearsal import Rehearsal
from mpitrain.trainer.trainer import Trainer

GPT = {"layers": 4, "width": 48, "heads": 12, "sequence": 12}


def cases(ranks):
    """Return the settings that are compared, by sections."""
    parallel = [{"zero": stage} for stage in range(4)]
    parallel += [{"zero": 2, "share_node": False}, {"zero": 3, "reshard": False}]
    parallel += [{"pipeline": ranks}, {"pipeline": ranks, "schedule": "zero-bubble"}]
    parallel += [{"tensor": ranks}, {"tensor": ranks, "sequence": True}]
    if ranks == 4:
        parallel += [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "zero": 3}, {"pipeline": 2, "zero": 1}]
    train = {"steps": 3, "batch": 12, "evaluate_samples": 1}
    listed = [{"train": train, "parallel": each} for each in parallel]
    reproducible = {"run": {"reproducible": True, "workers": ranks}, "train": train, "parallel": {"zero": 2}}
    narrow = {"train": train | {"precision": "bf16", "recompute": True, "microbatch": 1}}
    listed += [narrow | {"parallel": {"pipeline": ranks}}, narrow | {"parallel": {"zero": 3}}]
    return [*listed, reproducible] if ranks != 3 else listed  # which no power of two is a multiple of


@pytest.mark.ranks(2, 3, 4)
def test_a_rehearsed_rank_has_the_bytes_of_the_real_one(world, text, folder):
    configurations = [{"data": {"path": text}, "model": GPT} | case for case in cases(world.size)]
    alone = world.subgroup([world.rank])
    real, rehearsed = [], []
    for number, values in enumerate(configurations):
        place = {"dir": str(folder / str(number))}
        trainer = Trainer(values | {"run": values.get("run", {}) | place}, world=world)
        with trainer.working():
            assert trainer.train() == 0
        played = play_rank(alone, world.rank, world.size, world.local_size)
        rehearsal = Rehearsal(Config.from_dict(values), played)
        rehearsal.print = lambda text: None
        rehearsal.fit()
        real.append(asdict(trainer.engine.memory()))
        rehearsed.append(asdict(rehearsal.engine.memory()))
    alone.free()
    for values, one, other in zip(configurations, real, rehearsed, strict=True):
        assert one == other, values


@pytest.mark.serial
def test_a_rank_of_1024_is_rehearsed_and_what_does_not_fit_is_refused(sentence, tmp_path):
    settings = {"data.path": sentence, "model.layers": 4, "model.width": 64, "model.sequence": 32, "train.batch": 512}
    settings |= {"parallel.tensor": 4, "parallel.pipeline": 4, "parallel.zero": 2}
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = train_command(*flags, "--as-rank", 37, "--ranks", 1024, "--ranks-per-node", 8)
    ended = job(0, command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "1,024 ranks on 128 nodes, data 64 x pipeline 4 x tensor 4" in ended.stdout
    assert "bytes of rank 37" in ended.stdout and "without the other ranks" in ended.stdout
    one_line(job(0, [*command, "--memory", "100MiB"], cwd=tmp_path), "rank 37 needs", "may use 100 MiB")
    one_line(job(0, train_command("--as-rank", 8, "--ranks", 8), cwd=tmp_path), "--as-rank 8", "0 to 7")
    assert not list(tmp_path.iterdir())


@pytest.mark.serial
def test_a_dry_run_on_real_ranks_leaves_nothing_behind(sentence, tmp_path):
    flags = ("--data.path", sentence, "--model.sequence", 32, "--run.dir", tmp_path / "run", "--dry-run")
    ended = job(2, train_command(*flags, "--train.batch", 8), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks on 1 node" in ended.stdout and "the largest of" in ended.stdout
    assert not list(tmp_path.iterdir())

"""Steps that learn nothing: they are reported, a run that ends in them fails, and the last good checkpoint stays."""

from __future__ import annotations

import pytest
from train.jobs import run

from mpitrain.checkpoint.__main__ import main
from mpitrain.checkpoint.folders import finished_steps
from mpitrain.checkpoint.manifest import NON_FINITE_SINCE, read_manifest
from mpitrain.errors import EXIT_FAILED, NothingLearned
from mpitrain.monitor.run_files import summary
from mpitrain.trainer.engine import LossScale
from mpitrain.trainer.stopping import NonFiniteSteps


def sections(text, options, parallel=None, steps=14, **checkpoint):
    parallel = dict(parallel or {})
    precision = parallel.pop("precision", "fp32")
    return {
        "data": {"path": text},
        "model": {"factory": "train.odd_models:spoiled", "sequence": 16, "options": options},
        "train": {"steps": steps, "batch": 4, "microbatch": 2, "precision": precision, "evaluate_samples": 4},
        "optim": {"schedule": "constant", "warmup": 0},
        "checkpoint": {"every": 2, "keep": 2} | checkpoint,
        "parallel": parallel,
    }


LAYOUTS = [
    ({}, {}),
    ({"zero": 2, "precision": "bf16"}, {}),
    ({"zero": 1, "precision": "fp16"}, {"gradient": True}),
    ({"zero": 3, "share_node": False}, {"gradient": True}),
    ({"pipeline": 2}, {}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("parallel", "options"), LAYOUTS, ids=str)
def test_a_run_that_learns_nothing_any_more_fails_and_keeps_its_last_good_checkpoint(
    world, folder, text, parallel, options, capsys
):
    each = 2 if "pipeline" in parallel else 1  # passes a step
    options = {"first": 6 * each + 1} | options
    runs = [(10, [10, 8, 6]), (10, [10, 8, 6]), (13, [13, 12, 6])]  # from the start, again, and on
    for steps, saved_steps in runs if parallel == {} else runs[::2]:
        with pytest.raises(NothingLearned, match=r"since step 7.*step-00000006") as caught:
            run(world, folder / "r", **sections(text, options, parallel, steps))
        assert caught.value.agreed and caught.value.exit_code == EXIT_FAILED
        world.barrier()
        assert finished_steps(folder / "r/checkpoints") == saved_steps
    summary_text = summary(folder / "r")
    world.barrier()  # what the others look at is pruned below
    assert "7 of 13 steps, nothing learned since step 7" in summary_text
    if world.rank == 0:
        assert main(["ls", str(folder / "r")]) == 0
        assert capsys.readouterr().out.count("whole, nothing learned since step 7") == 2
        assert main(["prune", str(folder / "r"), "--keep", "1"]) == 0
        assert finished_steps(folder / "r/checkpoints") == [13, 6]


@pytest.mark.ranks(2)
def test_a_run_that_learns_again_is_a_good_one(world, folder, text):
    for name, parallel, options, marks in (
        ("fp32", {}, {"first": 5, "last": 8}, {5: 5, 6: 5, 7: 5, 8: 5}),
        ("fp16", {"precision": "fp16"}, {"first": 5, "last": 5, "gradient": True}, {}),  # as its loss scale may do
        ("fp16 three", {"precision": "fp16"}, {"first": 5, "last": 7, "gradient": True}, {6: 5, 7: 5}),
    ):
        lines = run(world, folder / name, **sections(text, options, parallel, 10, every=1, keep=20))
        skipped_steps = list(range(options["first"], options["last"] + 1))
        assert [m["step"] for m in lines if m.get("skipped")] == skipped_steps
        for step in range(1, 11):
            manifest = read_manifest(folder / name / f"checkpoints/step-{step:08d}")
            assert manifest.values[NON_FINITE_SINCE] == marks.get(step, 0)
    lines = run(world, folder / "few", **sections(text, {"first": 5, "last": 8}, steps=14))
    assert finished_steps(folder / "few/checkpoints") == [14, 12]


@pytest.mark.ranks(2)
def test_the_last_good_checkpoint_on_a_nodes_own_disk_stays_too(world, folder, text):
    options = sections(text, {"first": 7}, every=1, local=str(folder / "local"), flush_every=5)
    with pytest.raises(NothingLearned, match="step-00000005"):
        run(world, folder / "r", **options)
    world.barrier()
    [local] = (folder / "local").iterdir()
    assert finished_steps(local) == [6] and finished_steps(folder / "r/checkpoints") == [14, 10, 5]


def test_what_the_search_for_a_loss_scale_skips_is_expected_of_fp16_alone():
    nan = float("nan")
    for precision, expected in (("fp16", True), ("bf16", False), ("fp32", False)):
        scale = LossScale.of(precision)
        row = NonFiniteSteps().after(4, 2.0, True, scale)
        assert row.since == 4 and row.bad != expected
        assert row.after(5, 2.0, True, scale).bad and not row.after(5, 2.0, False, scale).since
        assert NonFiniteSteps().after(4, nan, True, scale).bad and NonFiniteSteps().after(4, nan, False, scale).bad


def test_a_row_of_skipped_steps_ends_a_run_after_as_many_as_abort_after_says():
    nan, scale = float("nan"), LossScale.of("fp32")
    row = NonFiniteSteps().after(7, 2.0, True, scale)
    assert [row.should_abort(step, 5) for step in (10, 11)] == [False, True] and not row.should_abort(1000, 0)
    first = NonFiniteSteps().after(1, nan, True, scale)
    assert [first.should_abort(step, 50) for step in (2, 3)] == [False, True] and first.should_abort(1, 1)
    assert not NonFiniteSteps().after(1, 2.0, True, scale).should_abort(3, 50)  # its loss is finite

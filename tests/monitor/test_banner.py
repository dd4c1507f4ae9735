import math
from dataclasses import replace

from mpitrain.monitor.banner import Outcome, RunFacts, banner, closing
from mpitrain.storage.text import counted, duration, short

FACTS = RunFacts(
    version="0.1.0",
    ranks=8,
    nodes=2,
    threads=1,
    device="CPU",
    mpi="Open MPI 5.0.11",
    model="gpt",
    parameters=429_568,
    data="data/python-source",
    samples=183_421,
    held_out_samples=2_048,
    tokens=128,
    batch=32,
    microbatch=4,
    steps=300,
    samples_taken=9_600,
    start_step=0,
    precision="fp32",
    run_dir="runs/first",
)
OUTCOME = Outcome(
    step=300,
    steps=300,
    start_step=100,
    loss=2.41234,
    held_out={"loss": "2.4400", "accuracy": "0.91"},
    seconds=100.0,
    step_seconds=80.0,
    samples_done=6400,
    tokens=128,
    peak_memory_bytes=512_000_000,
    run_dir="runs/first",
    commands=(("inspect", "python -m mpitrain.report runs/first"),),
)


def test_the_banner_tells_what_runs_where():
    lines = banner(FACTS).splitlines()
    assert lines == [
        "mpitrain 0.1.0",
        "  ranks        8 on 2 nodes, 1 thread each, CPU",
        "  MPI          Open MPI 5.0.11",
        "  model        gpt, 429,568 parameters",
        "  data         data/python-source",
        "  samples      183,421 of 128 tokens, 2,048 held out",
        "  batch        32 samples, at most 4 per rank and pass",
        "  steps        300 (0.0523 passes over the data)",
        "  precision    fp32",
        "  run folder   runs/first",
    ]


def test_the_banner_tells_a_resume_and_further_facts():
    text = banner(
        replace(FACTS, start_step=100, tokens=0, held_out_samples=0, notes=(("hint", "set OMP_NUM_THREADS"),))
    )
    assert "\n  samples      183,421\n" in text
    assert "300, from step 100 (" in text
    assert text.endswith("\n  hint         set OMP_NUM_THREADS")


def test_the_closing_lines_tell_the_result_and_what_to_do_next():
    assert closing(OUTCOME).splitlines() == [
        "done at step 300 of 300 (200 since the resume)",
        "  loss                2.4123",
        "  held-out loss       2.4400",
        "  held-out accuracy   0.91",
        "  throughput          80 samples/s (10.2k tokens/s) in steps",
        "  time                0:01:40, 0:01:20 of it in 200 steps",
        "  peak memory         512MB per rank at most",
        "  run folder          runs/first",
        "  inspect             python -m mpitrain.report runs/first",
    ]


def test_a_run_cut_short_or_without_a_step_says_so():
    stopped = closing(replace(OUTCOME, step=150, start_step=0, held_out={}, tokens=0))
    assert stopped.startswith("stopped at step 150 of 300\n")
    assert "held-out" not in stopped and "tokens" not in stopped
    idle = closing(replace(OUTCOME, start_step=300, loss=math.nan, samples_done=0, step_seconds=0.0))
    assert "none: no step was taken" in idle and "throughput          none" in idle
    assert "  loss                nan" in closing(replace(OUTCOME, loss=math.nan))


def test_numbers_read_well():
    assert [short(number) for number in (0, 7.5, 999, 999.6, 1000, 12_345, 999_499, 999_501)] == [
        "0", "7.5", "999", "1k", "1k", "12.3k", "999k", "1M",
    ]  # fmt: skip
    assert [short(number) for number in (4.07e6, 1.21e9, 3.1e15)] == ["4.07M", "1.21G", "3100T"]
    assert [duration(s) for s in (0, 59.6, 252, 421_203, math.nan, math.inf, -1)] == [
        "0:00:00", "0:01:00", "0:04:12", "117:00:03", "-:--:--", "-:--:--", "-:--:--",
    ]  # fmt: skip
    assert counted(1, "rank") == "1 rank" and counted(1234, "rank") == "1,234 ranks"

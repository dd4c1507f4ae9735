"""Long campaign: jobs killed at every moment of a save, a restart and a step, started again, and compared with jobs
that nobody killed.

    pytest --campaign tests/cluster/test_kill_campaign.py                   14 cases
    pytest --campaign tests/cluster/test_kill_campaign.py -k case-17-       the case of this number alone
    KILL_SEED=7 pytest --full tests/cluster/test_kill_campaign.py           500, of a seed
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import warm
from kill_cases import EVERY, SNAPSHOT, STEPS, Case, cases
from kill_points import COMMIT, MOMENTS, PRUNING, SAID, Kill, job_arguments, notes, reached
from support import clean_environment, train_command

from mpitrain.checkpoint.contents import damaged_places, differences
from mpitrain.checkpoint.folders import finished_steps, folder_name
from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.data import open_dataset
from mpitrain.data.prepare import prepare
from mpitrain.monitor import read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1500)]
LIMIT = 240.0  # seconds for a job, which takes a few; less than comm.timeout: the watchdog shall have no part in it
SAMPLES = 36  # of the data set: two epochs and a bit
TOGETHER = 2  # cases at a time
SAME = ("step", "loss", "lr", "grad_norm", "ids", "held_out_loss")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        seed = int(os.environ.get("KILL_SEED", "2" if full else "1"))
        chosen = cases(500 if full else 14, seed, both_sides=full)
        metafunc.parametrize("case", chosen, ids=lambda case: f"case-{case.label}")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out[-1500:]}\n{self.err[-3000:]}"


class Jobs:
    """Jobs on one data set; each undisturbed job runs only once."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self._data = folder, data
        self._undisturbed: dict[tuple[int, int, float], Future[Path]] = {}
        self._lock = threading.Lock()

    def train(self, case: Case, ranks: int, keep: int, run: Path, kill: Kill | None = None, *, steps: int = 0) -> Ended:
        """Run a training job.

        Args:
            kill: Kill that ends the job; the ranks then write their notes beside `run`.
            steps: Steps of a job that records all moments it passes; 0: records none.
        """
        options = {
            "run.dir": run,
            "data.path": self._data,
            "data.record_ids": "true",
            "model.layers": 1,
            "model.width": 16,
            "model.heads": 2,
            "model.sequence": 16,
            "model.dropout": case.dropout,
            "train.batch": 13,  # an epoch ends within a batch
            "train.steps": steps or STEPS,
            "train.evaluate_every": 3,
            "train.evaluate_samples": 8,
            "optim.warmup": 2,
            "parallel.zero": case.zero,
            "checkpoint.every": EVERY,
            "checkpoint.keep": keep,
            "checkpoint.files": case.files,
            "checkpoint.background": str(case.background).lower(),
        }
        arguments = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        command = train_command()
        if kill is not None or steps:
            _fresh(_notes_of(run))
            command = job_arguments(_notes_of(run), kill)
        return run_job(ranks, [*command, *arguments], run)

    def undisturbed(self, case: Case) -> Path:
        """Return the run folder of an undisturbed job like the case's, with all of its checkpoints."""
        key = (case.ranks, case.zero, case.dropout)
        with self._lock:
            mine = key not in self._undisturbed
            future = self._undisturbed.setdefault(key, Future())
        if mine:
            run = self.folder / "-".join(["undisturbed", *map(str, key)])
            try:
                ended = self.train(case, case.ranks, STEPS, run)
                assert ended.code == 0, f"undisturbed, {case}: {ended}"
                future.set_result(run)
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def run_job(ranks: int, command: Sequence[str], run: Path) -> Ended:
    """Run a job, which must end in time. Its output goes into files beside its run folder."""
    out, err = _beside(run, ".out"), _beside(run, ".err")
    with open(out, "w") as to_out, open(err, "w") as to_err:
        process = subprocess.Popen(
            warm.shared().launched(ranks, command),
            stdout=to_out,
            stderr=to_err,
            stdin=subprocess.DEVNULL,
            env=clean_environment(OMPI_MCA_mpi_yield_when_idle="1"),
            start_new_session=True,
        )
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun then ends its ranks
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ended = Ended(code or 0, out.read_text(errors="replace"), err.read_text(errors="replace"))
    assert code is not None, f"the job did not end within {LIMIT:.0f} s: {ended}"
    return ended


def _beside(run: Path, suffix: str) -> Path:
    return run.with_name(run.name + suffix)


def _notes_of(run: Path) -> Path:
    return _beside(run, ".notes")


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("kills")
    source = folder / "a.txt"
    source.write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 8)
    prepare([str(source)], folder / "text")
    assert len(open_dataset(folder / "text", sequence=16)) == SAMPLES
    return Jobs(folder, folder / "text")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, jobs: Jobs) -> Iterator[dict[int, Future[None]]]:
    """Yield futures of the selected cases, several of which run at once because a starting job leaves cores idle."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [item.callspec.params["case"] for item in here]
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield {case.number: pool.submit(try_case, jobs, case) for case in chosen}
        pool.shutdown(wait=False, cancel_futures=True)


def test_a_killed_job_resumes_with_the_same_results(case: Case, outcomes: dict[int, Future[None]]) -> None:
    outcomes[case.number].result()


def try_case(jobs: Jobs, case: Case) -> None:
    reference = jobs.undisturbed(case)
    run = jobs.folder / f"case-{case.number}" / "run"
    run.parent.mkdir()
    keep = 2 if case.damaged else 1
    spoiled: Path | None = None
    for kill in case.kills:
        ended = jobs.train(case, case.ranks, keep, run, kill)
        _check_the_kill(case, kill, run, ended)
        _check_checkpoints(case, run, reference, spoiled)
        if case.damaged and spoiled is None:
            spoiled = _damage_newest(run / "checkpoints")
    whole = [step for step in finished_steps(run / "checkpoints") if not list(damaged_places(_checkpoint(run, step)))]
    ended = jobs.train(case, case.then, keep, run)
    assert ended.code == 0, f"{case}: the restarted job failed: {ended}"
    went_on = [line.rpartition("/")[2] for line in ended.out.splitlines() if line.startswith("resumed from")]
    assert went_on == [folder_name(step) for step in whole[:1]], f"{case}: {whole} were whole: {ended}"
    _check_the_end(case, run, reference)
    if whole[:1] != [STEPS]:  # else the last job had nothing to save, and the pointer is a hint
        assert (run / "checkpoints/latest").read_text().strip() == folder_name(STEPS), f"{case}"
    if case.then == case.ranks:
        _check_checkpoints(case, run, reference, None)
    shutil.rmtree(run.parent)


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / folder_name(step)


def _check_the_kill(case: Case, kill: Kill, run: Path, ended: Ended) -> None:
    note = reached(_notes_of(run))
    assert note.exists(), f"{case}: never came {kill}: {ended}"
    assert ended.code != 0, f"{case}: the job survived {kill}: {ended}"
    left = _left_in_shared_memory(json.loads(note.read_text()))
    assert not left, f"{case}: left in shared memory: {left}"
    message = {"exception": SAID, "exit": "sys.exit(3)"}.get(kill.how, "")
    assert message in ended.err, f"{case}: nothing said of {kill}: {ended}"


def _left_in_shared_memory(mapped: Sequence[str]) -> list[str]:
    """Return the remaining files among those that a rank had mapped, and other files of its job.

    Open MPI's file names contain the job's number, also for files of other ranks that this rank had not mapped yet.
    """
    jobs = {match[1] for path in mapped if (match := re.search(r"/sm_segment\..+\.([0-9a-f]+)\.\d+$", path))}
    of_job = {str(file) for job in jobs for file in Path("/dev/shm").glob(f"*.{job}.*")}
    return sorted({path for path in mapped if os.path.exists(path)} | of_job)


def _check_checkpoints(case: Case, run: Path, reference: Path, spoiled: Path | None) -> None:
    """Check that every finished checkpoint has the bits of the undisturbed job's checkpoint of the same step."""
    for step in finished_steps(run / "checkpoints"):
        folder, theirs = _checkpoint(run, step), _checkpoint(reference, step)
        wrong = list(damaged_places(folder))
        if folder == spoiled and wrong:
            continue
        assert not wrong, f"{case}: {wrong}"
        wrong = list(differences(folder, theirs))
        assert not wrong, f"{case}: {wrong}"
        assert read_manifest(folder).values == read_manifest(theirs).values, f"{case}: {folder}"


def _damage_newest(checkpoints: Path) -> Path:
    """Flip a bit of a tensor in the newest checkpoint."""
    folder = checkpoints / folder_name(finished_steps(checkpoints)[0])
    extent = read_manifest(folder).extents[-1]
    with open(folder / extent.file, "r+b") as file:
        file.seek(extent.offset)
        byte = file.read(1)[0]
        file.seek(extent.offset)
        file.write(bytes([byte ^ 1]))
    assert list(damaged_places(folder))
    return folder


def _check_the_end(case: Case, run: Path, reference: Path) -> None:
    rows, theirs = read_metrics(run), read_metrics(reference)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), f"{case}"
    for row, expected in zip(rows, theirs, strict=True):
        if case.then == case.ranks:
            assert _chosen(row) == _chosen(expected), f"{case}"
        else:
            assert sorted(row["ids"]) == sorted(expected["ids"]), f"{case}: step {row['step']}"
            for key in {"loss", "held_out_loss"} & expected.keys():
                assert row[key] == pytest.approx(expected[key], rel=1e-5), f"{case}: step {row['step']}"
    ids = [number for row in rows for number in row["ids"]]
    for epoch in (ids[:SAMPLES], ids[SAMPLES : 2 * SAMPLES]):
        assert sorted(epoch) == list(range(SAMPLES)), f"{case}"
    assert finished_steps(run / "checkpoints")[0] == STEPS, f"{case}"
    left = [path.name for path in run.rglob("*") if ".tmp" in path.name]
    assert not left, f"{case}: left over: {left}"


def _chosen(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in SAME}


def test_the_kill_points_cover_all_steps_of_a_save(jobs: Jobs) -> None:
    """Two jobs pass all moments: one saves in the foreground; the other in the background, replacing and removing."""
    case = Case(0, 2, 2, "rank", False, 0, ())
    run = jobs.folder / "noted"
    assert jobs.train(case, 2, 3, run, steps=6).code == 0
    rank_notes = [_recorded_moments(run, rank) for rank in range(2)]
    _damage_newest(run / "checkpoints")
    ended = jobs.train(replace(case, files="node", background=True), 2, 1, run, steps=10)
    assert ended.code == 0, ended
    rank_notes = [first + _recorded_moments(run, rank) for rank, first in enumerate(rank_notes)]
    names = [[note["moment"] for note in notes if "moment" in note] for notes in rank_notes]
    assert set(names[0]) == set(MOMENTS)
    assert set(names[1]) >= {moment.name for moment in MOMENTS.values() if moment.who != "first"}
    for note in rank_notes[0] + rank_notes[1]:
        if "act" in note and ("/checkpoints" in note["path"] or "/" not in note["path"]):
            assert set(note["inside"]) - {"save", "restored"}, f"no moment covers {note}"
            if note["act"] == "fsync":
                assert any("fsynced" in name for name in note["inside"]), f"no moment is {note}"
    last = names[0][max(at for at, name in enumerate(names[0]) if name == "save") :]
    order = [moment.name for moment in (*COMMIT, *PRUNING) if moment is not SNAPSHOT]
    assert [name for name in dict.fromkeys(last) if name in order] == order


def _recorded_moments(run: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes(_notes_of(run), rank).read_text().splitlines()]

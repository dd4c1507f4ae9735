"""Training goes on with the same losses when hosts with local checkpoints are killed, and disks wiped or damaged."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support import PATIENCE, train_command
from warm import job, shared

from mpitrain.checkpoint.folders import finished_steps, folder_name
from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.data.prepare import prepare
from mpitrain.monitor import read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
ENDLESS = 10**6
SMALL = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.sequence": 32,
    "train.batch": 6,
    "optim.schedule": "constant",
    "checkpoint.flush_every": ENDLESS,
}


@pytest.mark.parametrize("redundancy", ["partner", "xor"])
def test_redundant_copies_survive_a_killed_host_and_flipped_bits(hosts, tmp_path, redundancy):
    (tmp_path / "a.txt").write_text("All happy families are alike; each unhappy family is unhappy.\n" * 400)
    prepare([str(tmp_path / "a.txt")], tmp_path / "text")
    run, disks = tmp_path / "r", tmp_path / "disks"
    own_disk = hosts.disks(disks)

    def command(folder, steps, **more):
        options = {**SMALL, "data.path": tmp_path / "text", "run.dir": folder, "train.steps": steps, **more}
        return train_command(*(word for key, value in options.items() for word in (f"--{key}", value)))

    def across(steps):
        more = {"checkpoint.every": 1, "checkpoint.local": own_disk, "checkpoint.redundancy": redundancy}
        return hosts.mpirun(shared().replace_python(command(run, steps, **more)), (1, 1, 1))

    def until(more_steps, *killed):
        """Run `more_steps` steps across the hosts, kill the hosts `killed`, and return the output so far."""
        first = read_metrics(run)[-1]["step"]
        with open(tmp_path / "out", "w") as out:
            started = subprocess.Popen(across(ENDLESS), env=hosts.environment(), stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 240 * PATIENCE
            while read_metrics(run)[-1]["step"] < first + more_steps:
                assert started.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
                time.sleep(0.02)
            for host in killed:
                hosts.kill(host)
            started.wait(120)
        finally:
            hosts.clear()
            started.kill()
            started.wait(120)
        return (tmp_path / "out").read_text()

    result = job(3, command(run, 3), timeout=240)
    assert result.returncode == 0, result.stderr
    assert "resumed from" in until(8, 1, 2, 3)

    # the kill may have come while a host had not finished the last one yet: damage one that has
    damage(max(disks.glob("h*"), key=lambda disk: finished_steps(next(disk.glob("mpitrain-*")))[0]))
    output = until(8, 2)
    assert "was damaged on a node's disk; repaired from other nodes" in output, output
    assert f"resumed from {own_disk}" in output, output

    for path in (disks / "h2").iterdir():  # the host comes back with an empty disk
        shutil.rmtree(path)
    output = until(8, 1, 2, 3)
    assert f"resumed from {own_disk}" in output, output

    damage(disks / "h2")
    damage(disks / "h3")
    steps = read_metrics(run)[-1]["step"] + 3
    result = subprocess.run(
        across(steps), env=hosts.environment(), capture_output=True, text=True, errors="replace", timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" in result.stdout and "damaged on every node that has it" in result.stdout, result.stdout
    assert f"resumed from {run / 'checkpoints' / folder_name(3)}" in result.stdout
    assert not [path for host in ("h1", "h2", "h3") for path in (disks / host).iterdir()]  # it ended well

    plain = job(3, command(tmp_path / "plain", steps), timeout=240)
    assert plain.returncode == 0, plain.stderr
    rows, expected = read_metrics(run), read_metrics(tmp_path / "plain")
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def damage(disk: Path) -> None:
    """Flip a bit in every tensor of every file of every checkpoint on a host's disk."""
    (root,) = disk.glob("mpitrain-*")
    assert finished_steps(root)
    for folder in (root / folder_name(step) for step in finished_steps(root)):
        for extent in read_manifest(folder).extents:
            if (folder / extent.file).exists() and extent.piece.numel:
                with open(folder / extent.file, "r+b") as file:
                    file.seek(extent.offset)
                    byte = file.read(1)[0]
                    file.seek(extent.offset)
                    file.write(bytes([byte ^ 1]))

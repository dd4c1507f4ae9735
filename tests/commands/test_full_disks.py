"""A command that writes to a full disk ends with one line, and leaves the previous files intact."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from monitor.report_runs import Story, make_run
from monitor.test_timeline import recorded
from support import fill, one_line, small_disk

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.__main__ import main as checkpoint
from mpitrain.monitor.timeline.merging import merge
from mpitrain.monitor.timeline.spans import write_rank
from mpitrain.report import main as report
from mpitrain.storage.disk import replacing, write_whole


def content(folder):
    """Return the content of every file below the folder, by path."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def refused(capsys):
    def run(main, *arguments, code=2):
        capsys.readouterr()
        return one_line((main([str(a) for a in arguments]), capsys.readouterr().err), code=code)

    return run


def test_earlier_reports_and_timelines_survive_a_full_disk(tmp_path, refused, capsys):
    run = make_run(tmp_path / "run", Story(ranks=2, steps=20, killed_at=0))
    with small_disk(tmp_path / "disk", "16m") as disk:
        assert report([str(run), "--out", str(disk / "page.html"), "--png", str(disk / "png")]) == 0
        timeline = disk / "r/timeline/steps-5-5"
        for rank in range(2):
            write_rank(timeline, recorded(rank))
        assert merge(timeline).picture is not None
        before = content(disk)
        for free in (0, 8 << 10):
            fill(disk / "ballast", free)
            assert "disk is full" in refused(report, run, "--out", disk / "page.html")
            assert "disk is full" in refused(report, run, "--png", disk / "png")
            if free == 0:
                assert "disk is full" in refused(report, "timeline", timeline)
            (disk / "ballast").unlink()
            assert content(disk) == before


def test_export_and_import_on_a_full_disk_leave_no_files(tmp_path, refused):
    torch.save({"x": torch.ones(1 << 17)}, tmp_path / "w.pt")
    assert checkpoint(["import", str(tmp_path / "w.pt"), str(tmp_path / "run")]) == 0
    with small_disk(tmp_path / "disk", "2m") as disk:
        for free in (0, 4 << 10, 256 << 10):
            fill(disk / "ballast", free)
            for name in ("x.pt", "x.safetensors"):
                assert "disk is full" in refused(checkpoint, "export", tmp_path / "run", disk / name)
            if free:
                assert "disk is full" in refused(checkpoint, "import", tmp_path / "w.pt", disk / "run")
                assert not list(disk.rglob("step-*"))
                shutil.rmtree(disk / "run", ignore_errors=True)
            assert [path.name for path in disk.iterdir()] == ["ballast"]


def test_an_import_whose_last_sync_fails_leaves_no_checkpoint_and_no_settings(tmp_path, refused, monkeypatch):
    torch.save({"x": torch.ones(8)}, tmp_path / "w.pt")
    run, sync = tmp_path / "run", folders.disk.sync

    def failing(path):
        if path.name == "checkpoints" and (path / "step-00000000").exists():
            raise OSError(28, os.strerror(28))
        sync(path)

    monkeypatch.setattr(folders.disk, "sync", failing)
    assert "disk is full" in refused(checkpoint, "import", tmp_path / "w.pt", run)
    assert not list(run.glob("checkpoints/step-*"))
    monkeypatch.undo()
    assert checkpoint(["import", str(tmp_path / "w.pt"), str(run)]) == 0


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    file, link = tmp_path / "page.html", tmp_path / "link.html"
    write_whole(file, "first\n")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "second\n")
    assert link.is_symlink() and file.read_text() == "second\n" and file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ZeroDivisionError), replacing(file) as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert file.read_text() == "second\n" and sorted(tmp_path.iterdir()) == [link, file]
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path.__class__("/dev/full"), json.dumps("nothing"))
    write_whole(tmp_path / ("x" * 240 + ".html"), "long names, too")

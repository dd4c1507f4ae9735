"""Atomic data set folders: makers that race, are killed, meet a full disk, or may not write."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import one_line

from mpitrain.data import open_dataset, resolve
from mpitrain.data.folders import make_dataset, python_files
from mpitrain.data.format import MANIFEST, read_manifest
from mpitrain.data.shards import verify
from mpitrain.data.sources import PrepareOptions
from mpitrain.data.sources.documents import text_source
from mpitrain.data.writer import write_dataset
from mpitrain.errors import InputError
from mpitrain.storage import locks
from mpitrain.storage.disk import MARK


@pytest.fixture
def fill(tmp_path):
    """Return a function that fills a folder with a small data set of two splits and three shards."""
    text = tmp_path / "source.txt"
    text.write_text("some text\n" * 200)

    def into(folder):
        write_dataset(folder, text_source([text], PrepareOptions()), names=("test",), held_out=0.1, shard_bytes=1000)

    return into


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def is_whole(folder):
    return list(verify(folder, read_manifest(folder))) == []


RACE = """if True:
    import os, sys, time
    from pathlib import Path
    from mpitrain.data.folders import make_dataset
    from mpitrain.data.sources import PrepareOptions
    from mpitrain.data.sources.documents import text_source
    from mpitrain.data.writer import write_dataset
    root, text, half_way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == 'half-way'
    def fill(folder):
        with open(root.parent / 'makers', 'a') as makers:
            makers.write(f'{os.getpid()}\\n')
        if half_way:
            (folder / 'train-00000.h5').write_text('half')
            (root.parent / 'half').touch()
            time.sleep(60)
        time.sleep(0.2)
        write_dataset(folder, text_source([text], PrepareOptions()), names=('test',), held_out=0.1, shard_bytes=1000)
    make_dataset(root / 'made', fill, once=True)
    print('done', flush=True)
"""


def wait_for(path, seconds=30.0):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


def test_a_waiting_process_takes_over_from_a_killed_maker(tmp_path, root, fill, python):
    text = tmp_path / "source.txt"
    victim = python(RACE, root, text, "half-way")
    wait_for(tmp_path / "half")
    others = [python(RACE, root, text, "all") for _ in range(3)]
    time.sleep(1.0)
    assert [other.poll() for other in others] == [None] * 3  # they wait
    assert not (root / "made").exists()
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=30)
    for other in others:
        assert other.communicate(timeout=30) == ("done\n", "")
    makers = [int(line) for line in (tmp_path / "makers").read_text().split()]
    assert makers[0] == victim.pid
    assert len(makers) == 2  # one made it, two found it made
    assert os.listdir(root) == ["made"]
    assert is_whole(root / "made")


def test_four_processes_make_the_default_data_set_once(tmp_path, python):
    code = (
        "import sys; from pathlib import Path; from mpitrain.data import resolve; print(resolve('', Path(sys.argv[1])))"
    )
    started = [python(code, tmp_path / "data") for _ in range(4)]
    folder = tmp_path / "data" / "python-source"
    for process in started:
        assert process.communicate(timeout=100) == (f"{folder}\n", "")
    assert os.listdir(tmp_path / "data") == ["python-source"]
    assert is_whole(folder)
    manifest = read_manifest(folder)
    rows = {name: split.rows for name, split in manifest.splits.items()}
    assert rows["train"] > 4_000_000
    assert rows["held_out"] / sum(rows.values()) == pytest.approx(0.05, abs=0.005)
    assert resolve("", tmp_path / "data") == folder  # the second time nothing is made
    assert read_manifest(folder) == manifest


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "unlink"])
def test_a_kill_at_any_call_leaves_no_incomplete_data_set(root, fill, call):
    """Send SIGKILL just before and just after each of these calls, in one run after the other."""
    for before in (True, False):
        count = 0
        while True:
            count += 1
            child = os.fork()
            if not child:
                try:
                    _die_at(call, count, before)
                    make_dataset(root / "made", fill, once=True)
                    os._exit(0)
                finally:
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
            assert not (root / "made").exists() or is_whole(root / "made")
            make_dataset(root / "made", fill, once=True)
            assert is_whole(root / "made")
            assert [name for name in os.listdir(root) if name != ".made.lock"] == ["made"]
            subprocess.run(["rm", "-r", root / "made"], check=True)
            if os.WIFEXITED(status):
                break
        assert count > 1


def _die_at(name, count, before):
    original, countdown = getattr(os, name), [count]

    def call(*arguments, **how):
        countdown[0] -= 1
        if countdown[0] == 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **how)
        if countdown[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, call)


def test_an_exception_leaves_nothing_behind(root, fill):
    def stopped(folder):
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(root / "made", stopped, once=True)
    assert os.listdir(root) == []


def test_leftovers_of_dead_processes_of_this_node_are_removed(root, fill):
    here = f".made.tmp-{os.uname().nodename}-"
    ours = [root / f"{here}123-0123abcd", root / f"{here}124-0123abcd", root / f"{here}125-0123abcd"]
    others = [root / ".made.tmp-elsewhere-123-0123abcd", root / f"{here}123-mine", root / f"{here}126-0123abcd"]
    for folder in (ours[0], *others):
        folder.mkdir()
        (folder / "train-00000.h5").touch()
    (ours[0] / MARK).touch()
    (others[1] / MARK).touch()  # and others[2], which has our name, has no mark
    ours[1].mkdir()  # killed before it had a mark
    make_dataset(ours[2], fill, once=True)  # killed before the rename
    make_dataset(root / "made", fill, once=True)
    assert sorted(os.listdir(root)) == sorted([*(folder.name for folder in others), "made"])
    assert all((folder / "train-00000.h5").exists() for folder in others)


def test_without_locks_the_first_rename_wins(root, fill, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def slow(folder):  # another maker is done meanwhile
        fill(folder)
        make_dataset(root / "made", fill, once=True)

    make_dataset(root / "made", slow, once=True)
    assert is_whole(root / "made")
    assert [name for name in os.listdir(root) if "tmp" in name] == []
    subprocess.run(["rm", "-r", root / "made"], check=True)
    with pytest.raises(InputError, match="was made by another process in the meantime"):
        make_dataset(root / "made", slow, once=False)


def test_files_are_durable_and_the_manifest_last_before_the_rename(root, fill, monkeypatch):
    happened = []

    def noted(call):
        original = getattr(os, call)

        def note(first, *rest):
            name = Path(os.readlink(f"/proc/self/fd/{first}")).name if isinstance(first, int) else ""
            happened.append((call, name))
            return original(first, *rest)

        monkeypatch.setattr(os, call, note)

    for call in ("pwrite", "fsync", "rename"):
        noted(call)
    make_dataset(root / "made", fill, once=True)
    assert happened[-4] == ("fsync", MANIFEST)
    assert happened[-3][1].startswith(".made.tmp-")  # the folder itself
    assert happened[-2:] == [("rename", ""), ("fsync", "root")]
    for shard in ("train-00000.h5", "train-00001.h5", "held_out-00000.h5"):
        calls = [call for call, name in happened[:-4] if name == shard]
        assert "pwrite" in calls
        assert calls[-1] == "fsync"


@pytest.fixture
def tiny_disk(tmp_path):
    """Return a function that mounts a file system of a given size; it skips the test where that is not allowed."""
    mounted = []

    def mount(kib):
        folder = tmp_path / f"disk-{kib}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a small tmpfs needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_reported_in_one_line_and_leaves_nothing(tmp_path, tiny_disk, refused, command):
    (tmp_path / "a.txt").write_bytes(b"some text\n" * 20_000)
    message, done = "", 0
    for kib in (4, 32, 64, 68, 72, 80, 120, 196, 200, 204, 208, 230, 260, 300, 600):
        disk = tiny_disk(kib)
        code, _, error = command("prepare", tmp_path / "a.txt", "--out", disk / "set", "--shard-mb", 0.1)
        if code == 0:
            done += 1
            assert is_whole(disk / "set")
        else:
            assert code == 2
            message = error
            assert os.listdir(disk) == []
    assert done
    assert message.endswith("cannot be written: the disk is full; free some space, or use another place\n")


def test_a_file_over_the_size_limit_is_reported_in_one_line(tmp_path, python):
    (tmp_path / "a.txt").write_bytes(b"some text\n" * 40_000)
    code = "import sys; from mpitrain.data.__main__ import main; sys.exit(main(sys.argv[1:]))"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    process = python(code, "prepare", tmp_path / "a.txt", "--out", tmp_path / "set", preexec_fn=limit)
    out, error = process.communicate(timeout=60)
    assert out == ""
    one_line((process.returncode, error), "a file would exceed the size limit (ulimit -f); use a smaller --shard-mb")
    assert os.listdir(tmp_path) == ["a.txt"]


def test_unwritable_output_folders_are_reported(open_folder, python):
    code = """if True:
        import os, sys
        from pathlib import Path
        from mpitrain.data.__main__ import main
        from mpitrain.data import resolve
        from mpitrain.errors import InputError
        folder = Path(sys.argv[1])
        (folder / 'a.txt').write_text('some text\\n' * 100)
        main(['prepare', str(folder / 'a.txt'), '--out', str(folder / 'digits')])
        (folder / 'locked').mkdir(mode=0o755)
        folder.chmod(0o555)
        (folder / 'locked').chmod(0o555)
        if os.geteuid() == 0:
            import sklearn.datasets
            os.seteuid(65534)
        print('start')
        for out in ('set', 'locked/set', 'new/set', 'a.txt/set'):
            print(main(['prepare', str(folder / 'a.txt'), '--out', str(folder / out)]), flush=True)
        try:
            resolve('', folder)
        except InputError as error:
            print(error)
        print(resolve('digits', folder))  # made already: nothing to write
    """
    out, error = python(code, open_folder).communicate(timeout=60)
    lines = error.splitlines()
    assert len(lines) == 4
    for line in lines[:3]:
        assert line.endswith("cannot be written: no permission; ask its owner for access, or use another place")
    assert lines[3].endswith("a.txt/set cannot be written: a file exists where a folder is needed; use another place")
    last_lines = out.split("start\n")[1].splitlines()
    assert last_lines[:4] == ["2"] * 4
    assert "python-source cannot be written: no permission" in last_lines[4]
    assert last_lines[5] == str(open_folder / "digits")


def test_a_source_without_permission_is_named(open_folder, python):
    code = """if True:
        import os, sys
        from pathlib import Path
        import mpitrain.data.prepare  # now, while Python's own files may be read
        from mpitrain.data.__main__ import main
        folder = Path(sys.argv[1])
        (folder / 'texts').mkdir()
        (folder / 'texts' / 'a.txt').write_text('some text\\n' * 100)
        (folder / 'texts' / 'a.txt').chmod(0)
        folder.chmod(0o777)
        if os.geteuid() == 0:
            os.seteuid(65534)
        for source in ('texts/a.txt', 'texts'):
            print(main(['prepare', str(folder / source), '--out', str(folder / 'set')]), flush=True)
    """
    out, error = python(code, open_folder).communicate(timeout=60)
    assert out.split() == ["2", "2"]
    lines = error.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "cannot be read: no permission; ask its owner for access" in line


def test_an_output_folder_that_exists_is_kept(tmp_path, refused):
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    (tmp_path / "set").mkdir()
    message = refused(tmp_path / "a.txt", out=tmp_path / "set")
    assert f"output folder {tmp_path / 'set'} exists already; use another --out, or remove it" in message
    assert os.listdir(tmp_path / "set") == []


def test_other_files_in_place_of_an_embedded_data_set_are_not_touched(tmp_path):
    (tmp_path / "python-source").mkdir()
    (tmp_path / "python-source" / "mine").touch()
    with pytest.raises(InputError, match="python-source exists already"):
        resolve("", tmp_path)
    assert os.listdir(tmp_path / "python-source") == ["mine"]


def test_digits_are_made_once(tmp_path):
    folder = resolve("digits", tmp_path)
    before = (folder / MANIFEST).stat().st_mtime_ns
    assert resolve("digits", tmp_path) == folder == tmp_path / "digits"
    assert (folder / MANIFEST).stat().st_mtime_ns == before
    train, held_out = open_dataset(folder), open_dataset(folder, "held_out")
    assert len(train) + len(held_out) == 1797
    assert len(held_out) == 180
    assert train.description.x_shape == (1, 8, 8)
    assert train.description.classes == tuple("0123456789")
    assert min(read_manifest(folder).splits["held_out"].class_counts) >= 8


def test_digits_without_scikit_learn(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r'scikit-learn; pip install "mpitrain\[digits\]"'):
        resolve("digits", tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_called_digits_is_reached_by_its_path(tmp_path, tokens_set, monkeypatch):
    folder, _ = tokens_set(100, name="digits")
    monkeypatch.chdir(tmp_path)
    assert resolve("./digits") == Path("digits")
    assert open_dataset(Path("digits"), sequence=4).description.kind == "tokens"
    assert resolve(str(folder)) == folder


def test_a_library_without_source_files_is_reported(tmp_path, monkeypatch):
    from mpitrain.data import folders

    monkeypatch.setattr(folders.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "nothing")})
    with pytest.raises(InputError, match=r"Python's standard library has no source files in .*; set data.path"):
        resolve("", tmp_path / "data")


def test_python_files_are_those_of_the_library_in_a_fixed_order(tmp_path):
    for name in ("b.py", "a.py", "a/z.py", "site-packages/x.py", "test/t.py", "a/tests/t.py", "a/readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in python_files(tmp_path)]
    assert names == ["a/z.py", "a.py", "b.py"]


def test_the_lock_survives_the_removal_of_its_file(root, monkeypatch):
    """Check that a process that locks a file which the holder has removed tries again on the new file."""
    opened = []
    flock = fcntl.flock

    def removed_once(descriptor, how):
        flock(descriptor, how)
        opened.append(os.fstat(descriptor).st_ino)
        if len(opened) == 1:
            os.unlink(root / ".made.lock")
            (root / "other").touch()  # so that the new file gets another inode
            (root / ".made.lock").touch()

    monkeypatch.setattr(fcntl, "flock", removed_once)
    with locks.wait_for(root / ".made.lock") as is_locked:
        assert is_locked
        assert (root / ".made.lock").stat().st_ino == opened[-1]
    assert len(opened) == 2
    assert not (root / ".made.lock").exists()

"""The command `python -m mpitrain.data`."""

import shlex

import h5py
import numpy as np
import pytest
from support import one_line

from mpitrain.config.settings import Config
from mpitrain.models import build_model
from mpitrain.planner.subject import description_of


def test_it_imports_neither_torch_nor_mpi(tmp_path, python):
    code = """if True:
        import sys
        from mpitrain.data.__main__ import main
        main(['prepare', sys.argv[1], '--out', sys.argv[2]])
        main(['info', sys.argv[2], '--verify'])
        print([name for name in ('torch', 'mpi4py', 'PIL', 'sklearn', 'tokenizers') if name in sys.modules])
    """
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    out, error = python(code, tmp_path / "a.txt", tmp_path / "set").communicate(timeout=60)
    assert error == ""
    assert out.splitlines()[-1] == "[]"


def test_a_data_set_is_no_source_and_not_part_of_one(tmp_path, command):
    for number in range(12):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = np.full((5, 2), number, "f4"), np.zeros(5, "i4")
    for name in ("first", "second"):  # the first one lies in the source of the second one
        code, out, _ = command("prepare", tmp_path, "--out", tmp_path / name, "--held-out", 0)
        assert code == 0 and "60 samples" in out
    code, _, error = command("prepare", tmp_path / "first", "--out", tmp_path / "third")
    one_line((code, error), "is a data set already; train on it with --data.path")


def test_info_describes_the_data_set(tmp_path, command):
    np.savez(tmp_path / "a.npz", x=np.zeros((200, 3, 4), np.uint8), y=np.arange(200) % 2)
    assert command("prepare", tmp_path / "a.npz", "--out", tmp_path / "set", "--shard-mb", 0.001)[0] == 0
    code, out, error = command("info", tmp_path / "set")
    assert (code, error) == (0, "")
    lines = {line[:12].strip(): line[12:] for line in out.splitlines()}
    assert lines["data set"] == str(tmp_path / "set")
    assert lines["kind"] == "arrays (one row per sample)"
    assert lines["train"].startswith("190 samples, ")
    assert lines["train"].endswith("KiB in 4 shards")
    assert lines["held out"].startswith("10 samples, ")
    assert lines["x"] == "3 x 4, stored as uint8, read as float32 of value/255"
    assert lines["y"] == "one number, stored as int64, read as int64"
    assert lines["classes"].startswith("2; samples of each (train, held out):")
    assert lines["source"] == str(tmp_path / "a.npz")
    assert lines["hashes"] == "not checked (--verify reads everything)"
    counts = [line.split() for line in out.splitlines() if line.startswith("              ")]
    assert [sum(int(row[column]) for row in counts) for column in (2, 3)] == [190, 10]


def test_the_command_that_prepare_suggests_trains_on_tables_images_and_text(tmp_path, command):
    (tmp_path / "table.csv").write_text("a,b,label\n" + "".join(f"{n},{n * n},{n % 2}\n" for n in range(20)))
    np.savez(tmp_path / "images.npz", x=np.zeros((40, 8, 9, 3), np.uint8), y=np.arange(40) % 2)
    (tmp_path / "words.txt").write_text("some words to learn from\n" * 400)
    for source, name in (("table.csv", "mlp"), ("images.npz", "resnet"), ("words.txt", "gpt")):
        code, out, _ = command("prepare", tmp_path / source, "--out", tmp_path / f"the {name} set")
        (suggestion,) = [line for line in out.splitlines() if line.startswith("train on it: ")]
        words = shlex.split(suggestion)
        config = Config.from_args(words[words.index("mpitrain.train") + 1 :])
        assert (code, config.model.name) == (0, name)
        build_model(config.model, description_of(config))  # which looks at the batch, too


def test_verify_names_every_damaged_place(tokens_set, command):
    folder, _ = tokens_set(200_000, shard=100_000)
    code, out, _ = command("info", folder, "--verify")
    assert code == 0
    assert "hashes      all right" in out
    for number, place in ((0, 5), (0, 70_000), (1, 99_999)):
        path = folder / f"train-0000{number}.h5"
        with h5py.File(path) as file:
            offset = file["tokens"].id.get_offset()
        content = bytearray(path.read_bytes())
        content[offset + place] ^= 64
        path.write_bytes(content)
    code, out, error = command("info", folder, "--verify")
    assert code == 2
    for where in (
        "train-00000.h5 field tokens, extent 0 (rows 0 to 65535)",
        "train-00000.h5 field tokens, extent 1 (rows 65536 to 99999)",
        "train-00001.h5 field tokens, extent 1 (rows 65536 to 99999)",
    ):
        assert f"{where} is damaged" in out
    assert error == f"error: data set {folder}: 3 damaged places, listed above; restore or prepare it again\n"


def test_info_on_a_folder_that_is_not_a_data_set(tmp_path, command):
    code, out, error = command("info", tmp_path)
    assert not out
    assert one_line((code, error)).startswith(f"error: data set {tmp_path} has no dataset.json")


@pytest.mark.parametrize("arguments", [[], ["prepare", "a.txt"], ["prepare", "--out", "x"], ["other"], ["info"]])
def test_wrong_usage_exits_with_2(command, arguments):
    code, _, error = command(*arguments)
    assert code == 2
    assert "usage: python -m mpitrain.data" in error


@pytest.mark.parametrize("size", ["0", "-1", "nan"])
def test_an_invalid_shard_size_is_refused(command, size):
    code, _, error = command("prepare", "a.txt", "--out", "x", f"--shard-mb={size}")
    assert code == 2
    assert "is not above 0" in error


def test_help_lists_the_sources(command):
    code, out, _ = command("prepare", "--help")
    assert code == 0
    for word in ("text files", "x.npy", "image folders", "IDX files", ".csv", "--held-out", "--tokenizer"):
        assert word in out

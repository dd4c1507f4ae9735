"""CSV tables."""

import numpy as np
import pytest

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest

ROWS = [[0.5 * i, -i, i * i] for i in range(12)]


def read_train(folder):
    data = open_dataset(folder)
    return data.read(np.arange(len(data)))


def write_table(path, labels, *, header=None, delimiter=",", at=3):
    lines = [delimiter.join(header)] if header else []
    for row, label in zip(ROWS, labels, strict=True):
        cells = [str(value) for value in row]
        cells.insert(at, str(label))
        lines.append(delimiter.join(cells))
    path.write_text("\n".join(lines) + "\n")
    return path


KINDS = ["b", "a", "c"] * 4


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", [None, ["p", "q", "r", "kind"]])
def test_text_labels_become_classes(tmp_path, command, header, delimiter):
    source = write_table(tmp_path / "a.csv", KINDS, header=header, delimiter=delimiter)
    assert command("prepare", source, "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    x, y = read_train(tmp_path / "set")
    np.testing.assert_allclose(x, ROWS, rtol=1e-6)
    assert y.tolist() == [1, 0, 2] * 4
    assert y.dtype == np.int64
    assert open_dataset(tmp_path / "set").description.classes == ("a", "b", "c")


def test_whole_numbers_become_classes_in_their_order(tmp_path, command):
    source = write_table(tmp_path / "a.csv", [10, 9, 200] * 4)
    assert command("prepare", source, "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    assert read_train(tmp_path / "set")[1].tolist() == [1, 0, 2] * 4
    assert open_dataset(tmp_path / "set").description.classes == ("9", "10", "200")


def test_fractions_are_numbers_to_predict(tmp_path, command):
    values = [1, 2, 3, 0.5, -1e-3, 6, 7, 8, 9, 10, 11, 12]
    source = write_table(tmp_path / "a.csv", values)
    assert command("prepare", source, "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    y = read_train(tmp_path / "set")[1]
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, values, rtol=1e-6)
    assert open_dataset(tmp_path / "set").description.classes is None


@pytest.mark.parametrize(
    ("header", "label"), [(["kind", "p", "q", "r"], "kind"), (None, "1"), (["label", "p", "q", "r"], None)]
)
def test_the_label_column_is_chosen_by_name_or_number(tmp_path, command, header, label):
    source = write_table(tmp_path / "a.csv", KINDS, header=header, at=0)
    label_options = ["--label", label] if label else []
    code, out, _ = command("prepare", source, "--out", tmp_path / "set", "--held-out", 0, *label_options)
    assert code == 0
    assert f"label: column {header[0] if header else 1}" in out
    np.testing.assert_allclose(read_train(tmp_path / "set")[0], ROWS, rtol=1e-6)


def test_several_tables_are_joined_and_blank_lines_ignored(tmp_path, command):
    one = write_table(tmp_path / "a.csv", KINDS, header=list("pqrs"))
    two = write_table(tmp_path / "b.csv", ["d"] * 12, header=list("pqrs"))
    two.write_text("\ufeff" + two.read_text().replace("\n", "\r\n") + "\r\n\r\n")
    assert command("prepare", one, two, "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    assert read_manifest(tmp_path / "set").splits["train"].class_counts == (4, 4, 4, 12)


def test_a_table_of_several_blocks(tmp_path, command):
    values = np.random.default_rng(0).normal(size=(700, 401)).astype(np.float32)
    np.savetxt(tmp_path / "a.csv", values, delimiter=",", fmt="%.9g")
    assert command("prepare", tmp_path / "a.csv", "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    x, y = read_train(tmp_path / "set")
    assert np.array_equal(x, values[:, :-1])
    assert np.array_equal(y, values[:, -1])


class TestRefused:
    def test_a_cell_that_is_not_a_number(self, tmp_path, refused):
        cases = {
            "oops": "'oops' is not a number",
            "": "a missing value",
            "nan": "a missing value",
            "inf": "--allow-nonf",
        }
        for cell, reason in cases.items():
            source = write_table(tmp_path / "a.csv", KINDS, header=list("pqrs"), at=0)
            source.write_text(source.read_text().replace("1.5,-3", f"{cell},-3"))
            message = refused(source, "--label", "p")
            assert "a.csv, line 5, column q: " in message and reason in message and "; fi" in message

    def test_rows_of_another_length(self, tmp_path, refused):
        source = write_table(tmp_path / "a.csv", KINDS)
        source.write_text(source.read_text() + "1,2,3\n")
        assert "a.csv, line 13: 3 columns where the first line has 4" in refused(source)

    def test_rows_of_another_length_are_skipped_with_skip_bad(self, tmp_path, command):
        source = write_table(tmp_path / "a.csv", KINDS, header=list("pqrs"))
        lines = source.read_text().splitlines()
        source.write_text("\n".join([*lines[:3], "1,2,3", *lines[3:], "1,2,3,4,5"]) + "\n")
        for options in ([], ["--missing", "mean", "--scale", "standard"]):
            out = tmp_path / f"set{len(options)}"
            code, output, _ = command("prepare", source, "--out", out, "--held-out", 0, "--skip-bad", *options)
            assert code == 0 and len(read_train(out)[0]) == len(lines) - 1
            assert (
                f"left out 2 rows with another number of columns, such as {source}, line 4: 3 columns where the"
                in output
            )

    def test_no_such_label(self, tmp_path, refused):
        source = write_table(tmp_path / "a.csv", KINDS, header=list("pqrs"))
        assert "has no column kind; its columns are p, q, r, s" in refused(source, "--label", "kind")
        source = write_table(tmp_path / "b.csv", KINDS)
        assert "has no column 5; its columns are 1 to 4" in refused(source, "--label", "5")

    def test_an_empty_label(self, tmp_path, refused):
        assert "line 12: the label is empty" in refused(write_table(tmp_path / "a.csv", [*KINDS[:11], ""]))

    def test_only_a_header(self, tmp_path, refused):
        (tmp_path / "a.csv").write_text("p,q,r\n")
        assert "has a header but no rows" in refused(tmp_path / "a.csv")

    def test_only_blank_lines(self, tmp_path, refused):
        (tmp_path / "a.csv").write_text("\n\n")
        assert "a.csv is empty" in refused(tmp_path / "a.csv")

    def test_one_column(self, tmp_path, refused):
        (tmp_path / "a.csv").write_text("1\n2\n")
        assert "a.csv has one column" in refused(tmp_path / "a.csv")

    def test_tables_with_different_columns(self, tmp_path, refused):
        one = write_table(tmp_path / "a.csv", KINDS, header=list("pqrs"))
        two = write_table(tmp_path / "b.csv", KINDS, header=list("pqrt"))
        assert "b.csv has other columns than" in refused(one, two)

    def test_not_utf8(self, tmp_path, refused):
        (tmp_path / "a.csv").write_bytes(b"1,2,caf\xe9\n3,4,tea\n")
        assert "a.csv is not UTF-8" in refused(tmp_path / "a.csv")

    def test_too_many_classes(self, tmp_path, refused):
        (tmp_path / "a.csv").write_text("".join(f"{i},name{i}\n" for i in range(70_000)))
        assert "more than 65536 different values, too many for classes" in refused(tmp_path / "a.csv")

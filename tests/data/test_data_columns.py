"""Table columns: selection, texts, missing values, and the same columns in another table."""

import gzip

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest
from mpitrain.data.sources import held_out_mask
from mpitrain.data.sources.table_files import rows_of_table

ROWS = 40
AGE = [None if i % 7 == 2 else 20.5 + i * i for i in range(ROWS)]
COLOUR = [("red", "green", "blue", None)[i % 4] for i in range(ROWS)]
CITY = [f"city {i}" for i in range(ROWS)]
KIND = [("no", "yes")[i % 3 == 0] for i in range(ROWS)]
COLUMNS = {"age": AGE, "colour": COLOUR, "city": CITY, "kind": KIND}


def csv_text(columns=COLUMNS):
    cells = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join("" if cell is None else str(cell) for cell in row) for row in cells)]
    return "\n".join(lines) + "\n"


def write_table(folder, form):
    path = folder / f"table.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(COLUMNS), path, row_group_size=16)
    elif form == "csv":
        path.write_text(csv_text())
    else:
        packed = gzip.compress if form == "csv.gz" else zstandard.ZstdCompressor().compress
        path.write_bytes(packed(csv_text().encode()))
    return path


def read_x(folder, split="train"):
    data = open_dataset(folder, split)
    return data.read(np.arange(len(data)))[0]


@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst", "parquet"])
def test_missing_values_and_texts_are_converted_as_the_manifest_says(tmp_path, command, form):
    source = write_table(tmp_path, form)
    options = ["--drop", "city", "--missing", "mean", "--categories", "onehot", "--held-out", 0.2]
    code, out, error = command("prepare", source, "--out", tmp_path / "set", *options)
    assert code == 0, error
    held_out = held_out_mask(0, ROWS, 0.2)
    age = np.array(AGE, float)
    mean = np.nanmean(age[~held_out])  # of the rows that train alone
    names = ["", "blue", "green", "red"]
    expected = np.array(
        [
            [mean if np.isnan(a) else a, *(float((c or "") == n) for n in names)]
            for a, c in zip(age, COLOUR, strict=True)
        ]
    )
    np.testing.assert_allclose(read_x(tmp_path / "set"), expected[~held_out], rtol=1e-6)
    np.testing.assert_allclose(read_x(tmp_path / "set", "held_out"), expected[held_out], rtol=1e-6)
    manifest = read_manifest(tmp_path / "set")
    assert manifest.classes == ("no", "yes")
    assert (
        f"column age: missing values were replaced by the mean, {mean:g}" in out
        and "column colour: 4 texts as one number each" in out
    )
    (tmp_path / "new.csv").write_text("colour,extra,age\nred,9,\nblue,9,3\n")
    (again,) = rows_of_table(tmp_path / "new.csv", manifest.columns)
    np.testing.assert_allclose(again, [[mean, 0, 0, 0, 1], [3, 0, 1, 0, 0]], rtol=1e-6)
    (tmp_path / "new.csv").write_text("colour,age\nred,2\npink,3\n")
    with pytest.raises(Exception, match="line 3, column colour: 'pink' is not among the values of this column"):
        list(rows_of_table(tmp_path / "new.csv", manifest.columns))


def test_standardised_columns_have_mean_0_and_deviation_1_over_training_rows(tmp_path, command, monkeypatch):
    monkeypatch.setattr("mpitrain.data.sources.table_files._CELLS", 28)  # seven rows in a block
    source = write_table(tmp_path, "csv")
    options = ["--drop", "city", "--missing", "median", "--categories", "onehot", "--held-out", 0.2]
    code, out, error = command("prepare", source, "--out", tmp_path / "raw", *options)
    assert code == 0 and "numbers reach up to 1541.5; most models learn better with --scale standard" in out, error
    code, out, error = command("prepare", source, "--out", tmp_path / "set", *options, "--scale", "standard")
    assert code == 0 and "mean 0 and deviation 1" in out and "--scale" not in out, error
    raw = read_x(tmp_path / "raw").astype(np.float64)
    mean, deviation = raw[:, 0].mean(), raw[:, 0].std()
    for split in ("train", "held_out"):
        expected = read_x(tmp_path / "raw", split)
        expected[:, 0] = (expected[:, 0] - mean) / deviation
        np.testing.assert_allclose(read_x(tmp_path / "set", split), expected, rtol=1e-5, atol=1e-6)
    (tmp_path / "new.csv").write_text("colour,age\nred,\nblue,3\n")
    (again,) = rows_of_table(tmp_path / "new.csv", read_manifest(tmp_path / "set").columns)
    median = np.nanmedian(np.array(AGE, float)[~held_out_mask(0, ROWS, 0.2)])
    np.testing.assert_allclose(again[:, 0], [(median - mean) / deviation, (3 - mean) / deviation], rtol=1e-5)


def test_like_converts_a_table_with_the_columns_and_classes_of_another(tmp_path, command):
    options = ["--drop", "city", "--missing", "mean", "--categories", "onehot", "--scale", "standard"]
    code, _, error = command(
        "prepare", write_table(tmp_path, "csv"), "--out", tmp_path / "set", *options, "--held-out", 0
    )
    assert code == 0, error
    (tmp_path / "new.csv").write_text("kind,extra,colour,age\nyes,9,red,\nyes,9,blue,3\n")
    like = ["--label", "kind", "--like", tmp_path / "set", "--held-out", 0]
    code, out, error = command("prepare", tmp_path / "new.csv", "--out", tmp_path / "new", *like)
    assert code == 0 and "4 texts as one number each" in out, error
    old, new = (read_manifest(tmp_path / name) for name in ("set", "new"))
    assert new.columns == old.columns and new.classes == old.classes == ("no", "yes")
    (expected,) = rows_of_table(tmp_path / "new.csv", old.columns)
    np.testing.assert_array_equal(read_x(tmp_path / "new"), expected)
    data = open_dataset(tmp_path / "new", "train")
    assert data.read(np.arange(2))[1].tolist() == [1, 1]
    assert command("prepare", tmp_path / "new.csv", "--out", tmp_path / "c", *like, "--scale", "standard")[0] == 2
    for text, message in {
        "kind,colour,age\nperhaps,red,1\n": "'perhaps' is not among the classes of --like ('no', 'yes')",
        "kind,colour,age\nyes,pink,1\n": "line 2, column colour: 'pink' is not among the values of this column",
        "kind,age\nyes,1\n": "has no column colour, which the data set of --like has",
    }.items():
        (tmp_path / "new.csv").write_text(text)
        code, _, error = command("prepare", tmp_path / "new.csv", "--out", tmp_path / "wrong", *like)
        assert code == 2 and message in error and error.count("\n") == 1, error


def test_other_conversions_of_missing_values_and_texts(tmp_path, command):
    source, columns = write_table(tmp_path, "csv"), ("--columns", "age,colour", "--held-out", 0)
    for number, (missing, fill) in enumerate({"median": np.nanmedian(np.array(AGE, float)), "zero": 0.0}.items()):
        out = tmp_path / f"set{number}"
        assert command("prepare", source, "--out", out, *columns, "--missing", missing, "--categories", "codes")[0] == 0
        x = read_x(out)
        assert x.shape == (ROWS, 2) and x[:4, 1].tolist() == [3, 2, 1, 0]
        assert x[2, 0] == pytest.approx(fill) and x[1, 0] == 21.5
    code, output, _ = command(
        "prepare", source, "--out", tmp_path / "less", "--columns", 1, "--missing", "drop", "--held-out", 0
    )
    assert code == 0 and "left out 6 rows with missing values" in output
    assert read_x(tmp_path / "less")[:, 0].tolist() == pytest.approx([age for age in AGE if age is not None])


def test_infinite_numbers_are_accepted_with_allow_nonfinite(tmp_path, command):
    (tmp_path / "a.csv").write_text("p,q,label\n1,2,0\ninf,nan,1\n")
    done = command("prepare", tmp_path / "a.csv", "--out", tmp_path / "set", "--held-out", 0, "--allow-nonfinite")
    assert done[0] == 0 and np.isinf(read_x(tmp_path / "set")[1, 0]) and np.isnan(read_x(tmp_path / "set")[1, 1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "line 4, column age: 6 missing values, the first one here; fill them in, choose --missing"),
        (["--missing", "zero"], "column colour: 'red' is not a number (30 such cells); fix it"),
        (["--columns", "age,size"], "has no column size; its columns are age, colour, city, kind"),
        (["--columns", "kind"], "no column is left to learn from"),
        (["--columns", "age", "--drop", "city"], "--columns and --drop both choose columns"),
        (["--size", "8"], "--size is for images"),
    ],
)
def test_unusable_columns_are_refused(tmp_path, refused, options, words):
    source = write_table(tmp_path, "csv")
    if not options:
        options = ["--columns", "age"]
    assert words in refused(source, *options)


def test_a_typing_error_does_not_make_a_text_column(tmp_path, refused):
    text = csv_text({"age": [*range(30), "3o"], "kind": ["a", *["b"] * 30]})
    (tmp_path / "a.csv").write_text(text)
    assert "line 32, column age: '3o' is not a number; fix it" in refused(tmp_path / "a.csv", "--categories", "codes")


def test_missing_labels_of_a_regression_are_not_a_class(tmp_path, refused):
    (tmp_path / "a.csv").write_text("1,0.5\n2,NA\n3,0.7\n")
    assert "line 2: the label is empty; fill it in" in refused(tmp_path / "a.csv")


def test_a_truncated_compressed_table_is_refused(tmp_path, refused):
    text = "".join(f"{i},{i * 37 % 1009},{i % 2}\n" for i in range(20_000)).encode()
    for suffix, packed in ((".gz", gzip.compress(text)), (".zst", zstandard.ZstdCompressor().compress(text))):
        (tmp_path / f"a.csv{suffix}").write_bytes(packed[: len(packed) // 2])
        assert f"a.csv{suffix} is damaged or cut off" in refused(tmp_path / f"a.csv{suffix}")


def test_nonfinite_numbers_in_arrays_are_counted_and_refused(tmp_path, refused, command):
    x = np.ones((50, 3))
    x[20, 1], x[30], x[40, 0] = np.nan, np.inf, 1e200  # too large for float32, in which x is handed over
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(50) % 2)
    message = refused(tmp_path / "a.npz")
    assert "array x of" in message and "row 20: 5 numbers from here on are nan, infinite or too large" in message
    code, out, _ = command("prepare", tmp_path / "a.npz", "--out", tmp_path / "set", "--allow-nonfinite")
    assert code == 0 and "has 5 numbers that are not finite" in out

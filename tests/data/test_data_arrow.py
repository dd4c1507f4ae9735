"""Arrow files, and folders of Hugging Face's `datasets`: the same samples as from Parquet."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc, parquet

from mpitrain.data import open_dataset
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.errors import InputError

TEXTS = {"text": [f"document {n}" for n in range(40)]}
TABLE = {"a": [n / 3 for n in range(20)], "b": [None, 2.5] * 10, "kind": ["x", "y"] * 10}


def write(path, content, *, stream=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(content)
    with (ipc.new_stream if stream else ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def hugging_face_folder(folder):
    """Write what `DatasetDict.save_to_disk` writes."""
    (folder / "train").mkdir(parents=True)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, texts in (("train", TEXTS["text"][:30]), ("test", TEXTS["text"][30:])):
        write(folder / split / "data-00000-of-00001.arrow", {"text": texts})
        (folder / split / "state.json").write_text(json.dumps({"_data_files": []}))
        (folder / split / "dataset_info.json").write_text(json.dumps({"features": {}}))


@pytest.mark.parametrize("stream", [False, True])
def test_tables_and_documents_equal_those_of_parquet(tmp_path, stream):
    for name, content in (("table", TABLE), ("texts", TEXTS)):
        options = PrepareOptions(label="kind", missing="mean") if name == "table" else None
        write(tmp_path / f"{name}.arrow", content, stream=stream)
        parquet.write_table(pyarrow.table(content), tmp_path / f"{name}.parquet")
        for suffix in ("arrow", "parquet"):
            prepare([str(tmp_path / f"{name}.{suffix}")], tmp_path / f"{name}-{suffix}", held_out=0.1, options=options)
        read = [open_dataset(tmp_path / f"{name}-{suffix}", sequence=8) for suffix in ("arrow", "parquet")]
        samples = [data.read(np.arange(len(data))) for data in read]
        assert all(np.array_equal(one, other) for one, other in zip(*samples, strict=True)) and len(read[0]) > 9


def test_a_folder_of_hugging_face_keeps_its_test_split(tmp_path):
    hugging_face_folder(tmp_path / "hf")
    manifest = prepare([str(tmp_path / "hf")], tmp_path / "set")
    sizes = {split: sum(len(text) + 1 for text in texts) for split, texts in
             (("train", TEXTS["text"][:30]), ("held_out", TEXTS["text"][30:]))}  # fmt: skip
    assert {name: split.rows for name, split in manifest.splits.items()} == sizes and not manifest.origin.notes


def test_a_truncated_file_is_refused(tmp_path):
    write(tmp_path / "t.arrow", TABLE)
    content = (tmp_path / "t.arrow").read_bytes()
    (tmp_path / "t.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"t\.arrow is damaged"):
        prepare([str(tmp_path / "t.arrow")], tmp_path / "set")

"""Tokens from other tools, read without conversion: flat files, arrays, Megatron's pairs of files."""

import gzip
import struct

import h5py
import numpy as np
import pytest

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest

TOKENS = np.random.default_rng(3).integers(0, 50_000, 300_000).astype(np.uint16)


def stream(folder, split="train"):
    return np.concatenate([h5py.File(path)["tokens"][...] for path in sorted(folder.glob(f"{split}-*.h5"))])


def write_megatron(stem, documents, dtype=np.uint16, code=8, sequences=1, gap=0):
    """Write a pair of files as Megatron-LM does, with `sequences` per document and `gap` bytes between them."""
    parts = [part for document in documents for part in np.array_split(np.array(document, dtype), sequences)]
    offsets = np.cumsum([0, *[part.nbytes + gap for part in parts]])[:-1]
    stem.with_suffix(".bin").write_bytes((b"?" * gap).join(part.tobytes() for part in parts))
    borders = np.arange(len(documents) + 1) * sequences
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(parts), len(borders))
    lengths = np.array([len(part) for part in parts], np.int32)
    content = head + lengths.tobytes() + offsets.astype(np.int64).tobytes() + borders.astype(np.int64).tobytes()
    stem.with_suffix(".idx").write_bytes(content)
    return stem.with_suffix(".idx")


@pytest.mark.parametrize("packed", [False, True])
def test_train_bin_and_val_bin_are_the_splits(tmp_path, command, packed):
    (tmp_path / "in").mkdir()
    for name, part in (("train", TOKENS[:250_001]), ("val", TOKENS[250_001:])):
        content = part.tobytes()
        path = tmp_path / "in" / f"{name}.bin{'.gz' * packed}"
        path.write_bytes(gzip.compress(content) if packed else content)
    assert command("prepare", tmp_path / "in", "--out", tmp_path / "set", "--vocabulary", 50_257)[0] == 0
    assert np.array_equal(stream(tmp_path / "set"), TOKENS[:250_001])
    assert np.array_equal(stream(tmp_path / "set", "held_out"), TOKENS[250_001:])
    assert read_manifest(tmp_path / "set").vocabulary == 50_257


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "uint32"])
def test_an_array_of_one_dimension_is_tokens(tmp_path, command, dtype):
    np.save(tmp_path / "tokens.npy", TOKENS.astype(dtype))
    flags = ("--out", tmp_path / "set", "--held-out", 0.1)
    assert command("prepare", tmp_path / "tokens.npy", *flags)[0] == 0
    assert np.array_equal(np.concatenate([stream(tmp_path / "set"), stream(tmp_path / "set", "held_out")]), TOKENS)
    assert len(stream(tmp_path / "set", "held_out")) == 30_000
    assert read_manifest(tmp_path / "set").vocabulary == TOKENS.max() + 1


def test_flat_tokens_of_32_bits(tmp_path, command):
    tokens = TOKENS.astype(np.uint32) * 3
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    flags = ("--dtype", "uint32", "--end-token", 7, "--held-out", 0, "--out", tmp_path / "set")
    assert command("prepare", tmp_path / "a.bin", *flags)[0] == 0
    assert np.array_equal(stream(tmp_path / "set"), tokens)
    assert open_dataset(tmp_path / "set", sequence=8, apart=True).description.apart == 7


@pytest.mark.parametrize(("dtype", "code", "sequences", "gap"), [("uint16", 8, 1, 0), ("int32", 4, 3, 6)])
def test_megatron_documents_are_held_out_whole_and_their_end_token_is_detected(
    tmp_path, command, dtype, code, sequences, gap
):
    random = np.random.default_rng(5)
    documents = [[*random.integers(0, 900, 1 + i % 50), 999] for i in range(200)]
    index = write_megatron(tmp_path / "corpus", documents, np.dtype(dtype), code, sequences, gap)
    for number, named in enumerate([[index], [index.with_suffix(".bin")], [index, index.with_suffix(".bin")]]):
        out = tmp_path / f"set-{number}"
        assert command("prepare", *named, "--held-out", 0.1, "--out", out)[0] == 0
        assert read_manifest(out).document_end == 999
        cut = {
            split: np.split(all_, np.flatnonzero(all_ == 999) + 1)[:-1]
            for split in ("train", "held_out")
            for all_ in [stream(out, split)]
        }
        assert len(cut["held_out"]) == 20
        all_documents = sorted(each.tolist() for each in [*cut["train"], *cut["held_out"]])
        assert all_documents == sorted([int(token) for token in document] for document in documents)


def test_an_end_token_is_added_to_megatron_documents_without_one(tmp_path, command):
    index = write_megatron(tmp_path / "corpus", [[1, 2, 3], [4, 5], [6]])
    flags = ("--held-out", 0, "--out", tmp_path / "set", "--end-token", 9)
    assert command("prepare", index, *flags)[0] == 0
    assert stream(tmp_path / "set").tolist() == [1, 2, 3, 9, 4, 5, 9, 6, 9]
    assert read_manifest(tmp_path / "set").vocabulary == 10


class TestRefused:
    def test_a_token_outside_the_vocabulary(self, tmp_path, refused):
        (tmp_path / "a.bin").write_bytes(np.array([1, 2, 500, 3], np.uint16).tobytes())
        np.save(tmp_path / "b.npy", np.array([5, -1, 3]))
        assert "a.bin, token 2: 500 is not in a vocabulary of 300" in refused(tmp_path / "a.bin", "--vocabulary", 300)
        assert "b.npy, token 1: -1 is not in a vocabulary" in refused(tmp_path / "b.npy")

    def test_a_size_that_is_not_a_multiple_of_the_dtype(self, tmp_path, refused):
        (tmp_path / "a.bin").write_bytes(b"12345")
        assert "a.bin has 5 bytes, which is not a multiple of 2, the size of uint16; set --dtype" in refused(
            tmp_path / "a.bin"
        )

    def test_an_index_that_does_not_match_its_tokens(self, tmp_path, refused):
        index = write_megatron(tmp_path / "corpus", [[1, 2, 3], [4, 5]])
        (tmp_path / "corpus.bin").write_bytes(b"12")
        assert "do not match" in refused(index)
        index.write_bytes(index.read_bytes()[:-9])
        assert "corpus.idx ends too early" in refused(index)
        (tmp_path / "corpus.bin").unlink()
        assert "corpus.idx needs a .bin of the same name" in refused(index)

    def test_an_end_token_by_name_without_a_tokenizer(self, tmp_path, refused):
        (tmp_path / "a.bin").write_bytes(b"1234")
        assert "add the --tokenizer, or use the token's number" in refused(tmp_path / "a.bin", "--end-token", "</s>")

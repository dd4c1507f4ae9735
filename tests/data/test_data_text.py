"""Text files and folders as one stream of bytes or tokens."""

import json
import zlib

import h5py
import numpy as np
import pytest

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest, write_manifest
from mpitrain.data.sources.documents import held_out_files
from mpitrain.errors import InputError


def stream(folder, split="train"):
    """Return all tokens of a split, read with h5py alone."""
    parts = [h5py.File(path)["tokens"][...] for path in sorted(folder.glob(f"{split}-*.h5"))]
    return np.concatenate(parts)


def texts(folder, count, size=400):
    """Write files of random letters, all different; return their bytes in the order of the file names."""
    folder.mkdir()
    random = np.random.default_rng(count)
    contents = [bytes(random.choice(list(b"abcdefg \n"), size).astype(np.uint8)) for _ in range(count)]
    for number, content in enumerate(contents):
        (folder / f"{number:03d}.txt").write_bytes(content)
    return contents


def test_the_end_of_a_single_file_is_held_out_after_a_line(tmp_path, command):
    lines = b"".join(b"line %04d\n" % i for i in range(1000))
    (tmp_path / "a.txt").write_bytes(lines)
    code, out, _ = command("prepare", tmp_path / "a.txt", "--out", tmp_path / "set")
    assert code == 0
    assert "tokens (bytes)" in out
    train, held_out = stream(tmp_path / "set").tobytes(), stream(tmp_path / "set", "held_out").tobytes()
    assert train + held_out == lines
    assert train.endswith(b"\n")
    assert abs(len(held_out) / len(lines) - 0.05) < 0.002


def test_whole_files_are_held_out(tmp_path, command):
    contents = texts(tmp_path / "texts", 60)
    assert command("prepare", tmp_path / "texts", "--out", tmp_path / "set", "--held-out", 0.1)[0] == 0
    held_out = stream(tmp_path / "set", "held_out").tobytes()
    train = stream(tmp_path / "set").tobytes()
    pieces = [held_out[i : i + 400] for i in range(0, len(held_out), 400)]
    assert len(pieces) == 6
    assert train == b"".join(content for content in contents if content not in pieces)
    assert set(pieces) <= set(contents)


def test_a_folder_is_read_recursively_in_order_without_hidden_and_binary_files(tmp_path, command):
    folder = tmp_path / "texts"
    texts(folder, 30)
    (folder / "sub").mkdir()
    (folder / "sub" / "z.md").write_text("the end")
    (folder / ".git").mkdir()
    (folder / ".git" / "secret").write_text("HIDDEN")
    (folder / ".env").write_text("HIDDEN")
    (folder / "empty.txt").touch()
    (folder / "program").write_bytes(b"\x7fELF\0\0\0")
    code, out, _ = command("prepare", folder, "--out", tmp_path / "set", "--held-out", 0)
    assert code == 0
    content = stream(tmp_path / "set").tobytes()
    assert content.endswith(b"the end")
    assert b"HIDDEN" not in content
    assert b"ELF" not in content
    assert len(content) == 30 * 400 + 7
    assert "skipped 1 files of other kinds, such as program" in out
    assert not (tmp_path / "set" / "held_out-00000.h5").exists()


def test_the_same_input_gives_the_same_data_set(tmp_path, command):
    texts(tmp_path / "texts", 20)
    for name in ("one", "two"):
        assert command("prepare", tmp_path / "texts", "--out", tmp_path / name)[0] == 0
    one, two = (read_manifest(tmp_path / name) for name in ("one", "two"))
    assert one.identity == two.identity
    assert (tmp_path / "one" / "train-00000.h5").read_bytes() == (tmp_path / "two" / "train-00000.h5").read_bytes()


def test_shards_have_the_requested_size(tokens_set):
    folder, content = tokens_set(10_000, shard=3000)
    manifest = read_manifest(folder)
    assert [shard.rows for shard in manifest.splits["train"].shards] == [3000, 3000, 3000, 1000]
    assert np.array_equal(stream(folder), content)
    assert [h5py.File(path)["tokens"].chunks for path in folder.glob("*.h5")] == [None] * 4


def test_a_shard_takes_many_blocks(tokens_set):
    folder, content = tokens_set(9_500_000, shard=1 << 30)  # gathered in blocks of 4 MiB
    assert len(list(folder.glob("*.h5"))) == 1
    assert np.array_equal(stream(folder), content)


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.3])
def test_held_out_files_approximate_the_fraction(fraction):
    sizes = np.random.default_rng(1).integers(1, 10_000, 500)
    held_out = held_out_files(sizes.tolist(), fraction)
    assert sizes[held_out].sum() / sizes.sum() == pytest.approx(fraction, rel=0.1)


@pytest.fixture
def tokenizer(tmp_path):
    """Write a real byte-level BPE tokenizer file, with a truncation that must not cut our text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the cat sat on the mat and the rat ran"] * 5, trainer)
    bpe.enable_truncation(16)
    bpe.enable_padding(length=16)
    bpe.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_gives_tokens_that_decode_to_the_text(tmp_path, command, tokenizer):
    from tokenizers import Tokenizer

    text = "the cat sat ünïcödé 🐈\n" * 40_000 + "x" * 600_000 + "€" * 300_000  # several pieces, also without lines
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    code, out, _ = command(
        "prepare", tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", tokenizer, "--held-out", 0
    )
    assert code == 0
    assert "tokenizer.json" in out
    ids = stream(tmp_path / "set")
    assert ids.dtype == np.uint16
    encoder = Tokenizer.from_file(str(tokenizer))
    assert encoder.decode(ids.tolist(), skip_special_tokens=False) == text
    assert (tmp_path / "set" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    description = open_dataset(tmp_path / "set", sequence=16).description
    assert description.vocabulary == encoder.get_vocab_size() > ids.max()


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path, command):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 70_000}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("the cat dog\n" * 100)
    code, _, _ = command(
        "prepare", tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", tmp_path / "words.json"
    )
    assert code == 0
    ids = stream(tmp_path / "set")
    assert ids.dtype == np.uint32
    assert ids[:4].tolist() == [1, 70_000, 0, 1]
    description = open_dataset(tmp_path / "set", sequence=4).description
    assert description.vocabulary == 70_001


def test_a_cut_never_splits_a_character_for_the_tokenizer(tmp_path, command, tokenizer):
    for size in range(37, 45):
        (tmp_path / "a.txt").write_text("🐈" * size, encoding="utf-8")
        out = tmp_path / f"set-{size}"
        assert command("prepare", tmp_path / "a.txt", "--out", out, "--tokenizer", tokenizer)[0] == 0


class TestRefused:
    def test_a_missing_path(self, refused):
        assert "nowhere.txt does not exist; use an existing file" in refused("nowhere.txt")

    def test_an_empty_file(self, tmp_path, refused):
        (tmp_path / "a.txt").touch()
        assert "a.txt is empty; use a file with data" in refused(tmp_path / "a.txt")

    def test_an_empty_folder(self, tmp_path, refused):
        (tmp_path / "nothing").mkdir()
        assert "nothing contains no data" in refused(tmp_path / "nothing")

    @pytest.mark.parametrize("name", ["model.pt", "a.mat", "a.pkl", "a.zip", "noname"])
    def test_an_unsupported_kind(self, tmp_path, refused, name):
        (tmp_path / name).write_bytes(b"PK\0\0binary")
        message = refused(tmp_path / name)
        assert f"{name} is of no kind that prepare can read; convert it to text, JSON lines, .npy/.npz" in message

    @pytest.mark.parametrize(
        ("name", "why"), [("a.h5", "file signature not found"), ("a.arrow", "is not a complete Arrow file")]
    )
    def test_a_file_that_is_not_what_its_name_says(self, tmp_path, refused, name, why):
        (tmp_path / name).write_bytes(b"PK\0\0binary")
        assert why in refused(tmp_path / name)

    def test_a_folder_of_unsupported_files(self, tmp_path, refused):
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "a.pt").write_bytes(b"PK\0")
        assert "contains only files that prepare cannot read, such as a.pt" in refused(tmp_path / "models")

    def test_text_that_is_not_utf8_with_a_tokenizer(self, tmp_path, refused, tokenizer):
        (tmp_path / "a.txt").write_bytes(b"abc\xff def\n" * 10)
        message = refused(tmp_path / "a.txt", "--tokenizer", tokenizer)
        assert "a.txt is not UTF-8 at byte 3" in message
        assert "without --tokenizer, --pack and --blank-lines" in message

    def test_a_file_that_is_not_a_tokenizer(self, tmp_path, refused):
        (tmp_path / "a.txt").write_text("abc")
        (tmp_path / "t.json").write_text("{}")
        assert "t.json is not a Hugging Face tokenizer" in refused(
            tmp_path / "a.txt", "--tokenizer", tmp_path / "t.json"
        )
        assert "none.json does not exist" in refused(tmp_path / "a.txt", "--tokenizer", tmp_path / "none.json")

    def test_too_little_to_hold_out(self, tmp_path, refused):
        (tmp_path / "a.txt").write_text("abc")
        message = refused(tmp_path / "a.txt")
        assert "too few tokens (3) to hold out 0.05" in message
        assert "--held-out 0" in message

    @pytest.mark.parametrize("fraction", ["0.6", "-0.1", "nan"])
    def test_a_fraction_out_of_range(self, tmp_path, refused, fraction):
        (tmp_path / "a.txt").write_text("abc")
        assert "is not a fraction from 0 to 0.5" in refused(tmp_path / "a.txt", f"--held-out={fraction}")

    def test_sources_of_two_kinds(self, tmp_path, refused):
        (tmp_path / "a.txt").write_text("abc")
        (tmp_path / "b.csv").write_text("1,2\n")
        message = refused(tmp_path / "a.txt", tmp_path / "b.csv")
        assert "the sources are of different kinds: text" in message
        assert "tables" in message

    def test_a_folder_of_two_kinds(self, tmp_path, refused):
        folder = tmp_path / "mixed"
        texts(folder, 3)
        (folder / "b.csv").write_text("1,2\n")
        assert "mixes text (000.txt) and tables (b.csv)" in refused(folder)

    def test_options_of_another_kind(self, tmp_path, refused):
        (tmp_path / "a.txt").write_text("abc")
        assert "--label is for tables, but these sources are text" in refused(tmp_path / "a.txt", "--label", "x")
        assert "--size is for images" in refused(tmp_path / "a.txt", "--size", "8x8")


def test_a_stream_without_end_tokens_keeps_its_old_format(tokens_set):
    folder, _ = tokens_set(5000)
    content = json.loads((folder / "dataset.json").read_text())
    assert not {"document_end", "pack"} & set(content)
    identified = [content["kind"], content["fields"], content["splits"]]
    canonical = json.dumps(identified, sort_keys=True, separators=(",", ":")).encode()
    assert read_manifest(folder).identity == f"{zlib.crc32(canonical):08x}"
    manifest = read_manifest(folder)
    write_manifest(folder, manifest.model_copy(update={"pack": 8}))
    with pytest.raises(InputError, match="not a multiple of the 9 of a sample; prepare the data set again"):
        read_manifest(folder)

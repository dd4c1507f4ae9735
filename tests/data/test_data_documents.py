"""Documents with an end, from JSON lines, parquet and compressed text, and masked prompts."""

import bz2
import gzip
import json
import lzma

import h5py
import numpy as np
import pytest

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest
from mpitrain.data.sources.encoder import Packer

TEXTS = [f"document {i}: " + "straße 🐈 " * (i % 7) for i in range(60)]


def write_lines(path, objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def write_parquet(path, **columns):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path, row_group_size=7)
    return path


def documents(folder, split="train"):
    """Return the documents of a stream, read with h5py alone and cut at their ends."""
    end = read_manifest(folder).document_end
    tokens = np.concatenate([h5py.File(path)["tokens"][...] for path in sorted(folder.glob(f"{split}-*.h5"))])
    assert tokens[-1] == end
    return [part[part != end] for part in np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]]


def texts_of(folder, split="train"):
    return [bytes(each.astype(np.uint8)).decode() for each in documents(folder, split)]


@pytest.fixture
def tokenizer(tmp_path, command):
    source = tmp_path / "for-the-tokenizer.txt"
    source.write_text("\n".join(TEXTS))
    assert command("tokenizer", source, "--out", tmp_path / "t.json", "--vocabulary", 300)[0] == 0
    return tmp_path / "t.json"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "json", "array.json", "parquet"])
def test_each_line_or_row_is_a_document_that_ends(tmp_path, command, kind, monkeypatch):
    monkeypatch.setattr("mpitrain.data.sources.streams.CHUNK", 64)  # characters of an array that are read at once
    source = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(source, text=TEXTS, other=list(range(60)))
    elif kind == "array.json":
        source.write_text(json.dumps([{"id": i, "text": text} for i, text in enumerate(TEXTS)], indent=1))
    else:
        write_lines(tmp_path / "plain", [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
        plain = (tmp_path / "plain").read_bytes()
        if kind.endswith("zst"):
            import zstandard

            plain = zstandard.ZstdCompressor().compress(plain[:999]) + zstandard.ZstdCompressor().compress(plain[999:])
        source.write_bytes(plain)
    code, out, _ = command("prepare", source, "--out", tmp_path / "set", "--held-out", 0.1)
    assert code == 0
    assert "token 256 ends each of them" in out
    train, held_out = texts_of(tmp_path / "set"), texts_of(tmp_path / "set", "held_out")
    assert len(held_out) == 6
    assert sorted(train + held_out) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text not in held_out]  # in their order
    facts = open_dataset(tmp_path / "set", sequence=8).description
    assert (facts.vocabulary, facts.document_end, facts.masked, facts.apart) == (257, 256, False, None)
    assert open_dataset(tmp_path / "set", sequence=8, apart=True).description.apart == 256


def test_files_named_train_and_validation_are_the_splits(tmp_path, command):
    (tmp_path / "in").mkdir()
    for name, texts in (("train-00000-of-00001", TEXTS[:40]), ("validation", TEXTS[40:])):
        write_lines(tmp_path / "in" / f"{name}.jsonl", [{"content": text} for text in texts])
    assert command("prepare", tmp_path / "in", "--text", "content", "--out", tmp_path / "set")[0] == 0
    assert texts_of(tmp_path / "set") == TEXTS[:40]
    assert texts_of(tmp_path / "set", "held_out") == TEXTS[40:]


def test_the_end_token_of_a_tokenizer_follows_each_document_and_file(tmp_path, command, tokenizer):
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(tokenizer))
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(text)
    for source in ("a.jsonl", "texts"):
        out = tmp_path / f"set-{source}"
        flags = ("--tokenizer", tokenizer, "--out", out, "--held-out", 0)
        assert command("prepare", tmp_path / source, *flags)[0] == 0
        assert read_manifest(out).document_end == reference.token_to_id("<|endoftext|>") == 0
        assert [reference.decode(each.tolist()) for each in documents(out)] == TEXTS
    assert (
        command(
            "prepare", tmp_path / "texts", "--tokenizer", tokenizer, "--end-token", "none", "--out", tmp_path / "joined"
        )[0]
        == 0
    )
    assert read_manifest(tmp_path / "joined").document_end is None


def test_half_a_surrogate_pair_is_a_question_mark_with_and_without_a_tokenizer(tmp_path, command, tokenizer):
    from mpitrain.data.sources.encoder import make_encoder
    from mpitrain.inference.prompts import BytesCodec, TokenizerCodec

    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a \\ud800 b"}\n{"text": "c"}\n')  # JSON allows it, UTF-8 does not
    out = tmp_path / "set"
    assert command("prepare", source, "--tokenizer", tokenizer, "--out", out, "--held-out", 0)[0] == 0
    expected = make_encoder(tokenizer, None, documents=True).encode(["a ? b"])[0].tolist()
    assert documents(out)[0].tolist() == expected == TokenizerCodec(tokenizer).encode("a \ud800 b")
    assert BytesCodec().encode("a \ud800 b") == list(b"a ? b")
    assert BytesCodec().encode("a \udcff") == list(b"a \xff")  # a byte of the command line stays


def test_prompt_tokens_are_masked_and_pairs_stay_whole(tmp_path, command):
    pairs = [(f"what is {i}?", f"it is {i * i}" + "!" * (i % 9)) for i in range(200)]
    write_lines(tmp_path / "a.jsonl", [{"question": q, "answer": a} for q, a in pairs])
    flags = ("--prompt", "question", "--completion", "answer", "--pack", 60, "--held-out", 0)
    code, out, _ = command("prepare", tmp_path / "a.jsonl", *flags, "--out", tmp_path / "set")
    assert code == 0
    assert "whole documents packed into 60 tokens" in out
    assert "--data.path" in out
    assert "--model.sequence 60" in out
    data = open_dataset(tmp_path / "set", sequence=60)
    assert data.description.masked
    x, y = data.read(np.arange(len(data)))
    answers = []
    for inputs, targets in zip(x, y, strict=True):
        whole = [*inputs.tolist(), None]
        for place, target in enumerate(targets.tolist()):
            assert target in (-100, whole[place + 1] if place < 59 else target)
        taught = targets[targets != -100]
        for answer in np.split(taught, np.flatnonzero(taught == 256) + 1)[:-1]:
            answers.append(bytes(answer[:-1].astype(np.uint8)).decode())
        questions = np.concatenate([inputs, targets[-1:]])
        assert taught.tolist() == [] or questions[0] == ord("w")  # a sample begins with a whole prompt
    assert sorted(answers) == sorted(answer for _, answer in pairs)
    used = sum(len(q) + len(a) + 1 for q, a in pairs) / (len(data) * 61)
    assert used > 0.85


def test_packed_text_has_each_document_once_and_cuts_only_long_ones(tmp_path, command):
    texts = [chr(97 + i % 26) * (1 + i * 7 % 90) for i in range(100)]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ("--pack", 32, "--held-out", 0, "--out", tmp_path / "set")
    assert command("prepare", tmp_path / "a.jsonl", *flags)[0] == 0
    with h5py.File(tmp_path / "set" / "train-00000.h5") as shard:
        tokens, mask = shard["tokens"][...], shard["mask"][...]
    expected = np.bincount(np.frombuffer("".join(texts).encode(), np.uint8), minlength=257)
    expected[256] = len(texts)
    assert (
        np.bincount(tokens[mask == 1], minlength=257).tolist() == expected.tolist()
    )  # each token once, overlaps not twice
    for sample in tokens.reshape(-1, 33):
        ends = np.flatnonzero(sample == 256)
        for document in np.split(sample, ends + 1):
            assert len(set(document[document != 256].tolist())) <= 1  # no document begins inside of another
    x, y = open_dataset(tmp_path / "set", sequence=32).read(np.array([1, 0]))
    assert x.tolist() == tokens.reshape(-1, 33)[[1, 0], :-1].tolist()
    assert y.tolist() == np.where(mask == 1, tokens.astype(int), -100).reshape(-1, 33)[[1, 0], 1:].tolist()


@pytest.mark.parametrize("blank_lines", [False, True])
def test_text_files_are_packed_like_the_same_documents_in_json_lines(tmp_path, command, blank_lines):
    texts = [chr(97 + i % 26) * (1 + i * 7 % 40) + "\n" + "x" * (i % 3) for i in range(60)]
    (tmp_path / "text").mkdir()
    if blank_lines:
        gaps = ["\n\n", "\r\n \t\r\n\n", "\n\n\n"]
        whole = "\n" + "".join(text.rstrip("\n") + gaps[i % 3] for i, text in enumerate(texts))
        (tmp_path / "text/all.txt").write_bytes(whole.encode())
        texts = [text.rstrip("\n") for text in texts]
    else:
        for number, text in enumerate(texts):
            (tmp_path / f"text/{number:02}.txt").write_text(text)
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ("--blank-lines",) if blank_lines else ()
    for source, more in (("text", flags), ("a.jsonl", ())):
        for out, pack in (("packed", ("--pack", 32)), ("stream", ())):
            if pack or source == "a.jsonl" or blank_lines:
                where = ("--held-out", 0.1, "--out", tmp_path / f"{source}-{out}")
                assert command("prepare", tmp_path / source, *more, *pack, *where)[0] == 0
    for out in ("packed", "stream") if blank_lines else ("packed",):
        for split in ("train", "held_out"):
            datasets = [open_dataset(tmp_path / f"{s}-{out}", split, sequence=32) for s in ("text", "a.jsonl")]
            ours, theirs = (data.read(np.arange(len(data))) for data in datasets)
            assert len(datasets[0]) == len(datasets[1]) > 0
            assert (ours[0] == theirs[0]).all() and (ours[1] == theirs[1]).all()


def test_packing_is_first_fit():
    packer = Packer(4, 9, "uint8", whole=False)
    sample = packer.add(
        [(np.array(each, np.uint8), untrained) for each, untrained in (([1, 1, 9], 1), ([2, 2, 2, 9], 0), ([3, 9], 1))]
    )
    last_sample = packer.finish()
    assert sample[0].tolist() == [1, 1, 9, 3, 9]
    assert sample[1].tolist() == [0, 1, 1, 0, 1]
    assert last_sample[0].tolist() == [2, 2, 2, 9, 9]
    assert last_sample[1].tolist() == [1, 1, 1, 1, 0]
    long = Packer(4, 9, "uint8", whole=False)
    pieces = [*long.add([(np.arange(8, dtype=np.uint8), 0)]), *long.finish()]
    assert pieces[0].tolist() == [0, 1, 2, 3, 4]
    assert pieces[2].tolist() == [4, 5, 6, 7, 9]
    assert pieces[3].tolist() == [0, 1, 1, 1, 0]  # 4 was a target of the piece before


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_compressed_text_gives_the_data_set_of_the_plain_text(tmp_path, command, suffix):
    import zstandard

    text = "".join(f"line {i} of some text\n" for i in range(3000)).encode()
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}[suffix]
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / f"a.txt.{suffix}").write_bytes(pack(text))
    identities = []
    for name in ("a.txt", f"a.txt.{suffix}"):
        assert command("prepare", tmp_path / name, "--out", tmp_path / f"set-{name}")[0] == 0
        identities.append(read_manifest(tmp_path / f"set-{name}").identity)
    assert identities[0] == identities[1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-be"])
def test_utf_16_is_recognised_and_read_with_encoding(tmp_path, command, refused, encoding):
    text = "Grüße, all of you 🐈\n" * 500
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.txt").write_bytes(text.encode())
    message = refused(tmp_path / "a.txt")
    assert f"a.txt is {encoding.upper()}; add --encoding {encoding}" in message
    flags = ("--encoding", encoding, "--out", tmp_path / "a")
    assert command("prepare", tmp_path / "a.txt", *flags)[0] == 0
    assert command("prepare", tmp_path / "b.txt", "--out", tmp_path / "b")[0] == 0
    assert read_manifest(tmp_path / "a").identity == read_manifest(tmp_path / "b").identity


def test_a_tokenizer_is_the_same_each_time_and_decodes_what_it_encodes(tmp_path, command):
    from tokenizers import Tokenizer

    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS * 5])
    write_parquet(tmp_path / "b.parquet", text=TEXTS * 5)
    for source, out in (("a.jsonl", "1.json"), ("a.jsonl", "2.json"), ("b.parquet", "3.json")):
        flags = ("--vocabulary", 400, "--out", tmp_path / out)
        code, output, _ = command("tokenizer", tmp_path / source, *flags)
        assert code == 0
        assert "tokens" in output
    files = [(tmp_path / out).read_bytes() for out in ("1.json", "2.json", "3.json")]
    assert files[0] == files[1] == files[2]
    reference = Tokenizer.from_file(str(tmp_path / "1.json"))
    assert reference.token_to_id("<|endoftext|>") == 0
    odd = "ünseen ✓ \x00 text \t\n"
    assert reference.decode(reference.encode(odd).ids) == odd
    assert len(reference.encode("document straße").ids) < 8


class TestRefused:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"text": "ab', "a.jsonl, line 3 is not valid JSON (Unterminated string"),
            ('{"txt": "b"}', "a.jsonl, line 3 has no field 'text' (its fields: txt); name the field with --text"),
            ('{"text": 7}', "a.jsonl, line 3: field 'text' is a number, not text"),
            ('{"text": null}', "a.jsonl, line 3: field 'text' is null, not text"),
            ('["a"]', "a.jsonl, line 3 is not an object with fields"),
        ],
    )
    def test_a_broken_line_by_its_number(self, tmp_path, refused, line, message):
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
        assert message in refused(tmp_path / "a.jsonl")

    def test_a_broken_element_of_an_array_by_its_line(self, tmp_path, refused):
        whole = json.dumps([{"text": "a"}, {"text": "b"}], indent=1)
        (tmp_path / "a.json").write_text(whole.replace('"b"', "b"))
        (tmp_path / "b.json").write_text(whole.rstrip("]"))
        assert "a.json, line 5 is not valid JSON (Expecting value)" in refused(tmp_path / "a.json")
        assert "before the ] of its array" in refused(tmp_path / "b.json")

    def test_damaged_files(self, tmp_path, refused):
        whole = gzip.compress(b'{"text": "abc"}\n' * 5000)
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:-40])
        (tmp_path / "b.jsonl.zst").write_bytes(b"no zstandard at all")
        (tmp_path / "c.parquet").write_bytes(b"PAR1 nothing")
        assert "a.jsonl.gz is damaged or cut off" in refused(tmp_path / "a.jsonl.gz")
        assert "b.jsonl.zst is damaged or cut off" in refused(tmp_path / "b.jsonl.zst")
        assert "c.parquet is not a complete Parquet file" in refused(tmp_path / "c.parquet")

    def test_parquet_that_is_damaged_inside(self, tmp_path, refused):
        path = write_parquet(tmp_path / "a.parquet", text=[f"{i} {i * i}" for i in range(500)])
        content = bytearray(path.read_bytes())
        content[4:4000] = bytes(3996)
        path.write_bytes(content)
        assert "a.parquet is damaged" in refused(path)

    def test_incompatible_options_are_refused(self, tmp_path, refused, tokenizer):
        source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
        assert "--completion is the answer to --prompt" in refused(source, "--completion", "text")
        assert "use only one of them" in refused(source, "--prompt", "a", "--text", "b")
        assert "no token '</s>' for --end-token" in refused(source, "--tokenizer", tokenizer, "--end-token", "</s>")
        assert "--end-token <x> needs a --tokenizer" in refused(source, "--end-token", "<x>")
        assert "packed documents need an end token;" in refused(source, "--pack", 8, "--end-token", "none")
        assert "--encoding utf-99 is unknown" in refused(tmp_path / "for-the-tokenizer.txt", "--encoding", "utf-99")
        assert "--blank-lines is for text, but these" in refused(source, "--blank-lines")
        np.save(tmp_path / "numbers.npy", np.arange(9, dtype=np.uint16))
        assert "--pack is for JSON lines or parquet of text and text" in refused(tmp_path / "numbers.npy", "--pack", 8)

    def test_opening_packed_data_with_another_sequence_is_refused(self, tmp_path, command):
        from mpitrain.errors import InputError

        write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 90)
        assert command("prepare", tmp_path / "a.jsonl", "--prompt", "prompt", "--out", tmp_path / "set")[0] == 0
        with pytest.raises(
            InputError, match=r"was packed for samples of 1024 tokens, not 128; set model.sequence 1024"
        ):
            open_dataset(tmp_path / "set", sequence=128)

    def test_tokenizer_refuses_a_small_vocabulary_and_an_existing_file(self, tmp_path, command, tokenizer):
        from support import one_line

        (tmp_path / "a.txt").write_text("abc")
        code, _, message = command("tokenizer", tmp_path / "a.txt", "--out", tmp_path / "n.json", "--vocabulary", 99)
        assert "is too small for the 256 bytes" in one_line((code, message))
        code, _, message = command("tokenizer", tmp_path / "a.txt", "--out", tokenizer)
        assert "t.json exists already" in one_line((code, message))

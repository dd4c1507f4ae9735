"""Images that stay encoded in the user's files: decoded by threads, in the order and with the bits of one thread."""

import io
import json
import shutil
import tarfile
import threading

import numpy as np
import pytest
from PIL import Image
from support import job, one_line, train_command

from mpitrain.data import Loader, SampleOrder, decoding, open_dataset
from mpitrain.data.folders import stage
from mpitrain.data.format import read_manifest

COUNT = 40


@pytest.fixture
def photos(tmp_path):
    """Return a folder of JPEG files of several sizes, in two classes."""
    folder = tmp_path / "photos"
    for number in range(COUNT):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, (20 + number % 3, 16 + number % 5, 3)).astype(np.uint8)
        path = folder / ("cat" if number % 2 else "dog") / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture
def placed(photos, tmp_path, command):
    """Return a data set in place of the photos, with a held-out split."""
    code, out, error = command("prepare", photos, "--size", "8x6", "--in-place", "--out", tmp_path / "placed")
    assert code == 0, error
    assert "3 x 8 x 6, decoded when it is read" in out and f"images in {photos}" in out
    return tmp_path / "placed"


def read_all(folder, threads, split="train"):
    data = open_dataset(folder, split, threads=threads)
    x, y = data.read(np.random.default_rng(1).permutation(len(data)))
    data.close()
    return x, y


def decoders():
    return [thread for thread in threading.enumerate() if thread.name.startswith("image-decoder")]


@pytest.mark.parametrize("form", ["folders", "archive"])
def test_threads_return_the_order_and_the_bits_of_decoded_data(photos, tmp_path, command, monkeypatch, form):
    source = photos
    if form == "archive":
        source = tmp_path / "photos.tar"
        with tarfile.open(source, "w") as archive:
            for path in sorted(photos.rglob("*.jpg")):
                archive.add(path, f"{path.stem}.jpg")
                label = tarfile.TarInfo(f"{path.stem}.cls")
                label.size = 3
                archive.addfile(label, io.BytesIO(path.parent.name.encode()))
    for name, flags in (("decoded", ()), ("placed", ("--in-place",))):
        assert command("prepare", source, "--size", "8x6", *flags, "--out", tmp_path / name)[0] == 0
    meeting, names = threading.Barrier(3), set()

    def read(*arguments, **options):
        if len(names) < 3 and threading.current_thread() is not threading.main_thread():
            names.add(threading.current_thread().name)
            meeting.wait(20)  # three images are decoded at a time
        return original(*arguments, **options)

    original = decoding.read_image
    monkeypatch.setattr(decoding, "read_image", read)
    for split in ("train", "held_out"):
        expected = read_all(tmp_path / "decoded", 1, split)
        for threads in (1, 3):
            if split == "held_out":
                names.update("abc")  # too few images to wait for each other
            for got, wanted in zip(read_all(tmp_path / "placed", threads, split), expected, strict=True):
                assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    assert len([name for name in names if name.startswith("image-decoder")]) == 3
    assert not decoders()


def test_a_moved_data_set_prepared_again_has_the_same_identity(photos, placed, tmp_path, command):
    moved = shutil.move(photos, tmp_path / "elsewhere")
    assert command("prepare", moved, "--size", "8x6", "--in-place", "--out", tmp_path / "again")[0] == 0
    assert read_manifest(tmp_path / "again").identity == read_manifest(placed).identity
    assert np.array_equal(read_all(tmp_path / "again", 2)[0], read_all(tmp_path / "again", 1)[0])


def damage(path, kind):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    match kind:
        case "changed":
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-5])
        case "longer":
            path.write_bytes(bytes(3) + path.read_bytes())
        case "missing":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()


@pytest.mark.parametrize("kind", ["changed", "cut", "longer", "missing", "folder"])
def test_a_damaged_image_is_one_line_that_names_its_file(photos, placed, command, kind):
    path = photos / "cat" / "07.jpg"
    damage(path, kind)
    data = open_dataset(placed, threads=3)
    with (
        Loader(data, SampleOrder(len(data), 1), batch=len(data), share=lambda size: (0, size)) as loader,
        pytest.raises(decoding.InputError, match=f"image {path} ") as caught,
    ):
        next(loader)
    assert "\n" not in str(caught.value) and "restore that file, or prepare the data set again" in str(caught.value)
    assert not decoders()
    code, out, error = command("info", placed, "--verify")
    assert code == 2 and f"image {path} " in out and "1 damaged places" in one_line((code, error))


def test_threads_end_with_the_loader_while_images_are_being_decoded(placed, monkeypatch):
    before = threading.active_count()
    data = open_dataset(placed, threads=3)
    with Loader(
        data, SampleOrder(len(data), 1), batch=8, share=lambda size: (0, size), workers=2, prefetch=4
    ) as loader:
        first = next(loader)
        assert decoders()
    assert threading.active_count() == before
    again = data.read(first.ids)  # starts threads again
    assert np.array_equal(first.x.numpy(), again[0])
    del data, loader  # a data set that nobody closes leaves no threads either
    for thread in decoders():
        thread.join(20)
    assert threading.active_count() == before


@pytest.mark.serial
def test_ranks_train_on_images_in_place_and_end_at_a_damaged_one(photos, placed, tmp_path):
    settings = ["--data.path", placed, "--model.name", "mlp", "--train.batch", 38, "--train.steps", 2]

    def train(name):
        return job(2, train_command(*settings, "--data.record_ids", "true", "--run.dir", tmp_path / name))

    done = train("run")
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    order = SampleOrder(38, 1)
    assert [each["ids"] for each in records if "ids" in each] == [order.ids(at, 38).tolist() for at in (0, 38)]
    damage(photos / "cat" / "07.jpg", "changed")
    one_line(train("damaged"), f"image {photos / 'cat' / '07.jpg'} was changed or damaged", alone=False)


def test_what_cannot_stay_in_place_is_refused(photos, placed, tmp_path, refused):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(photos, "photos")
    message = refused(tmp_path / "a.tar.gz", "--in-place")
    assert "a.tar.gz is compressed, so --in-place cannot read it; decompress it to a .tar" in message
    with pytest.raises(decoding.InputError, match=r"data\.stage copies shards, but"):
        stage(placed, tmp_path / "stage")

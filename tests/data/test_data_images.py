"""Image folders and IDX files."""

import gzip
import struct
import sys

import numpy as np
import pytest
from PIL import Image

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest


def read_split(folder, split="train"):
    data = open_dataset(folder, split)
    return data.read(np.arange(len(data)))


def write_image(path, height=6, width=4, seed=0, mode="RGB"):
    """Write a PNG of random pixels; return them as uint8 [height, width, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return pixels


def test_image_folders_round_trip(tmp_path, command):
    pixels = [
        write_image(tmp_path / "pets" / kind / f"{i}.png", seed=10 * k + i)
        for k, kind in enumerate(("cat", "dog"))
        for i in range(5)
    ]
    code, out, _ = command("prepare", tmp_path / "pets", "--out", tmp_path / "set", "--held-out", 0)
    assert code == 0
    x, y = read_split(tmp_path / "set")
    assert x.dtype == np.float32
    assert x.shape == (10, 3, 6, 4)
    np.testing.assert_allclose(x, np.stack(pixels).transpose(0, 3, 1, 2) / 255, rtol=1e-6)
    assert y.tolist() == [0] * 5 + [1] * 5
    assert open_dataset(tmp_path / "set").description.classes == ("cat", "dog")
    assert "3 x 6 x 4, stored as uint8, read as float32 of value/255" in out
    assert "0  cat" in out


def test_a_split_of_the_input_is_kept(tmp_path, command):
    for split, seeds in (("train", (1, 2)), ("val", (3,))):
        for kind in ("cat", "dog"):
            for seed in seeds:
                write_image(tmp_path / "pets" / split / kind / f"{seed}.png", seed=seed)
    assert command("prepare", tmp_path / "pets", "--out", tmp_path / "set")[0] == 0
    splits = read_manifest(tmp_path / "set").splits
    assert {name: split.class_counts for name, split in splits.items()} == {"train": (2, 2), "held_out": (1, 1)}
    assert open_dataset(tmp_path / "set").description.classes == ("cat", "dog")


def test_a_train_folder_without_a_test_folder_is_split(tmp_path, command):
    for kind in ("cat", "dog"):
        for seed in range(10):
            write_image(tmp_path / "pets" / "train" / kind / f"{seed}.png", seed=seed)
    assert command("prepare", tmp_path / "pets", "--out", tmp_path / "set", "--held-out", 0.2)[0] == 0
    assert {name: split.rows for name, split in read_manifest(tmp_path / "set").splits.items()} == {
        "train": 16,
        "held_out": 4,
    }
    assert open_dataset(tmp_path / "set").description.classes == ("cat", "dog")


def test_several_class_folders_as_sources(tmp_path, command):
    for kind in ("cat", "dog"):
        write_image(tmp_path / kind / "1.png")
    code, _, _ = command("prepare", tmp_path / "cat", tmp_path / "dog", "--out", tmp_path / "set", "--held-out", 0)
    assert code == 0
    assert open_dataset(tmp_path / "set").description.classes == ("cat", "dog")


def test_mixed_sizes_with_a_size(tmp_path, command):
    write_image(tmp_path / "pets" / "cat" / "1.png", 8, 8)
    write_image(tmp_path / "pets" / "dog" / "1.png", 16, 10)
    Image.new("RGB", (30, 10), (0, 0, 255)).save(tmp_path / "pets" / "dog" / "2.jpg")
    code, _, _ = command("prepare", tmp_path / "pets", "--out", tmp_path / "set", "--size", "4x6", "--held-out", 0)
    assert code == 0
    x, _ = read_split(tmp_path / "set")
    assert x.shape == (3, 3, 4, 6)
    np.testing.assert_allclose(x[2, :, 1, 3], [0, 0, 1], atol=0.02)


def test_images_are_rotated_according_to_exif(tmp_path, command):
    left_red = np.zeros((2, 4, 3), np.uint8)
    left_red[:, :2, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        Image.fromarray(left_red).save(tmp_path / "pets" / kind / "1.png", exif=exif)
    assert command("prepare", tmp_path / "pets", "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    x, _ = read_split(tmp_path / "set")
    assert x.shape[2:] == (4, 2)
    assert (x[0, 0, :2] == 1).all()
    assert (x[0, 0, 2:] == 0).all()


class TestImagesRefused:
    def test_mixed_sizes(self, tmp_path, refused):
        write_image(tmp_path / "pets" / "cat" / "1.png", 8, 8)
        write_image(tmp_path / "pets" / "dog" / "1.png", 16, 10)
        message = refused(tmp_path / "pets")
        assert "dog/1.png is 16x10, but the first is 8x8" in message
        assert "--size 8x8" in message

    def test_one_class(self, tmp_path, refused):
        write_image(tmp_path / "pets" / "1.png")
        assert "has only the class pets; put each class into" in refused(tmp_path / "pets")

    def test_a_file_that_is_not_an_image(self, tmp_path, refused):
        write_image(tmp_path / "pets" / "cat" / "1.png")
        (tmp_path / "pets" / "dog").mkdir()
        (tmp_path / "pets" / "dog" / "1.png").write_text("hello")
        assert "dog/1.png is not an image, although its name says so" in refused(tmp_path / "pets")

    def test_a_truncated_image(self, tmp_path, refused):
        for kind in ("cat", "dog"):
            write_image(tmp_path / "pets" / kind / "1.png", 50, 50)
        path = tmp_path / "pets" / "dog" / "1.png"
        path.write_bytes(path.read_bytes()[:3000])
        assert "dog/1.png cannot be" in refused(tmp_path / "pets")

    def test_more_than_8_bits(self, tmp_path, refused):
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / kind).mkdir(parents=True)
            Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "pets" / kind / "1.png")
        assert "cat/1.png has pixels of more than 8 bits" in refused(tmp_path / "pets")

    def test_without_pillow(self, tmp_path, refused, monkeypatch):
        write_image(tmp_path / "pets" / "cat" / "1.png")
        monkeypatch.setitem(sys.modules, "PIL", None)
        assert 'images need the package pillow; pip install "mpitrain[data]"' in refused(tmp_path / "pets")

    @pytest.mark.parametrize("size", ["0", "8x", "x8", "8x8x8", "-4", "a"])
    def test_an_invalid_size_is_refused(self, tmp_path, command, size):
        code, _, message = command("prepare", tmp_path, "--out", tmp_path / "set", f"--size={size}")
        assert code == 2
        assert f"'{size}' is not a size; write 224 or 128x256" in message


def idx(path, array):
    codes = {"uint8": 8, "int32": 12, "float32": 13}
    head = bytes([0, 0, codes[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def mnist(folder, packed=True, rows=300):
    """Write files under MNIST's names; return the train images and labels."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, count in (("t10k", rows // 3), ("train", rows)):
        images = random.integers(0, 256, (count, 5, 7)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        end = ".gz" if packed else ""
        idx(folder / f"{name}-images-idx3-ubyte{end}", images)
        idx(folder / f"{name}-labels-idx1-ubyte{end}", labels)
    return images, labels


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_files_round_trip(tmp_path, command, packed):
    images, labels = mnist(tmp_path / "mnist", packed)
    assert command("prepare", tmp_path / "mnist", "--out", tmp_path / "set")[0] == 0
    x, y = read_split(tmp_path / "set")
    np.testing.assert_allclose(x, images[:, None] / 255, rtol=1e-6)
    assert np.array_equal(y, labels)
    assert len(read_split(tmp_path / "set", "held_out")[1]) == 100
    description = open_dataset(tmp_path / "set").description
    assert (description.x_shape, len(description.classes)) == ((1, 5, 7), 10)


def test_idx_without_a_test_set_is_split(tmp_path, command):
    mnist(tmp_path / "mnist")
    train = sorted((tmp_path / "mnist").glob("train*"))
    assert command("prepare", *train, "--out", tmp_path / "set", "--held-out", 0.1)[0] == 0
    assert {name: split.rows for name, split in read_manifest(tmp_path / "set").splits.items()} == {
        "train": 270,
        "held_out": 30,
    }


def test_idx_floats_are_big_endian(tmp_path, command):
    values = np.arange(12, dtype=np.float32).reshape(6, 2) / 3
    idx(tmp_path / "a-images.idx2-float", values)
    idx(tmp_path / "a-labels.idx1-int", np.array([0, 1, 300, 2, 0, 1], np.int32))
    files = tmp_path / "a-images.idx2-float", tmp_path / "a-labels.idx1-int"
    assert command("prepare", *files, "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    x, y = read_split(tmp_path / "set")
    assert np.array_equal(x, values)
    assert y.tolist() == [0, 1, 300, 2, 0, 1]


class TestIdxRefused:
    def test_no_labels(self, tmp_path, refused):
        mnist(tmp_path / "mnist")
        assert "has no labels file next to it; name them" in refused(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
        assert "has no images file next to it; use both files" in refused(
            tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
        )

    def test_a_truncated_idx_file(self, tmp_path, refused):
        for packed, reason in ((True, "is damaged or cut off"), (False, "ends too early; download it again")):
            folder = tmp_path / f"mnist-{packed}"
            mnist(folder, packed)
            path = next(folder.glob("train-images*"))
            path.write_bytes(path.read_bytes()[:-50])
            message = refused(folder)
            assert path.name in message
            assert reason in message

    def test_a_file_that_is_not_idx(self, tmp_path, refused):
        mnist(tmp_path / "mnist", packed=False)
        (tmp_path / "mnist" / "train-images-idx3-ubyte").write_text("hello world")
        assert "is not an IDX file, although its name says so" in refused(tmp_path / "mnist")

    def test_different_numbers_of_images_and_labels(self, tmp_path, refused):
        mnist(tmp_path / "mnist", packed=False)
        idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", np.zeros(7, np.uint8))
        assert "has 300 images" in refused(tmp_path / "mnist")

    def test_two_training_sets(self, tmp_path, refused):
        for name in ("a", "b"):
            idx(tmp_path / f"{name}-images-idx3-ubyte", np.zeros((3, 2, 2), np.uint8))
            idx(tmp_path / f"{name}-labels-idx1-ubyte", np.zeros(3, np.uint8))
        assert "are two sets of images; use one" in refused(*tmp_path.glob("*ubyte"))

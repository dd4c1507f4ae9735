"""Archives of images, and images that cannot be read."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest


def make_image(seed, form="PNG"):
    """Return an image as uint8 [3, 5, 4] and the content of its file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 4, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return pixels.transpose(2, 0, 1), file.getvalue()


def write_archive(path, members):
    """Write a tar archive. members: (name, content), or a TarInfo of another kind of entry."""
    with tarfile.open(path, "w") as file:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                file.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            file.addfile(info, io.BytesIO(member[1]))
    return path


def image_pairs(seeds, label, ending="cls"):
    return [m for i in seeds for m in ((f"a/{i:04}.png", make_image(i)[1]), (f"a/{i:04}.{ending}", label(i)))]


def read_split(folder, split="train"):
    data = open_dataset(folder, split)
    return data.read(np.arange(len(data)))


def test_archives_are_read_in_order_and_other_files_ignored(tmp_path, command):
    link = tarfile.TarInfo("a/0001.jpg")  # to a file of this machine, which is never followed
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    away = ("../../0100.png", make_image(100)[1]), ("../../0100.cls", b"1\n")  # a path that is nobody's business
    members = [
        ("readme.md", b"hello"),
        *image_pairs(range(6), lambda i: b"%d\n" % (i % 2)),
        ("a/0005.xyz", b"?"),
        link,
        *away,
    ]
    write_archive(tmp_path / "train-0000.tar", members)
    second = write_archive(tmp_path / "second.tar", image_pairs(range(6, 9), lambda i: b"0"))
    (tmp_path / "train-0001.tar.gz").write_bytes(gzip.compress(second.read_bytes()))
    second.unlink()
    write_archive(tmp_path / "val-0000.tar", image_pairs(range(9, 12), lambda i: b"1"))
    (tmp_path / "names").write_text("cat\ndog\n")
    code, out, error = command(
        "prepare", *sorted(tmp_path.glob("*.tar*")), "--out", tmp_path / "set", "--classes", tmp_path / "names"
    )
    assert code == 0, error
    x, y = read_split(tmp_path / "set")
    seeds = [*range(6), 100, *range(6, 9)]
    np.testing.assert_allclose(x * 255, np.stack([make_image(i)[0] for i in seeds]), atol=1e-3)
    assert y.tolist() == [0, 1, 0, 1, 0, 1, 1, 0, 0, 0]
    assert read_split(tmp_path / "set", "held_out")[1].tolist() == [1, 1, 1]
    assert read_manifest(tmp_path / "set").classes == ("cat", "dog")
    assert "ignored 3 other files, such as readme.md" in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "names", "set", "train-0000.tar", "train-0001.tar.gz", "val-0000.tar"
    }  # fmt: skip


def test_class_names_in_json_or_text(tmp_path, command):
    kinds = ("dog", "cat")
    forms = {
        "json": lambda i: json.dumps({"label": kinds[i % 2], "id": i}).encode(),
        "txt": lambda i: kinds[i % 2].encode(),
    }
    for ending, label in forms.items():
        source = write_archive(tmp_path / f"{ending}.tar", image_pairs(range(4), label, ending))
        assert command("prepare", source, "--out", tmp_path / ending, "--held-out", 0)[0] == 0
        assert read_split(tmp_path / ending)[1].tolist() == [1, 0, 1, 0]
        assert read_manifest(tmp_path / ending).classes == ("cat", "dog")


@pytest.mark.parametrize("form", ["folders", "archive"])
def test_unreadable_images_are_skipped_and_counted_with_skip_bad(tmp_path, command, refused, form):
    good = make_image(0)[1]
    contents = [b"", good[:60], good, b"no image", good, good]  # of classes 0 1 0 1 0 1
    source = tmp_path / "images.tar"
    if form == "archive":
        write_archive(
            source, [m for i, c in enumerate(contents) for m in ((f"{i}.png", c), (f"{i}.cls", b"%d" % (i % 2)))]
        )
    else:
        for i, content in enumerate(contents):
            (source / str(i % 2)).mkdir(parents=True, exist_ok=True)
            (source / str(i % 2) / f"{i}.png").write_bytes(content)
    message = refused(source)
    assert ("0.png" in message or "0 in archive" in message) and "--skip-bad" in message
    code, out, _ = command("prepare", source, "--out", tmp_path / "set", "--held-out", 0, "--skip-bad")
    assert code == 0 and "left out 3 images that cannot be read, such as " in out
    assert read_split(tmp_path / "set")[1].tolist() == [0, 0, 1]


def test_unusable_archives_are_refused(tmp_path, refused):
    whole = write_archive(tmp_path / "a.tar", image_pairs(range(40), lambda i: b"%d" % i)).read_bytes()
    for at in (len(whole) // 2 // 512 * 512, 512 * 3 + 100, 0):
        (tmp_path / "cut.tar").write_bytes(whole[:at] or b"nothing of the kind")
        assert "cut.tar is not a complete tar file" in refused(tmp_path / "cut.tar")
    damaged = bytearray(whole)
    damaged[1024 * 20 + 10] ^= 255  # in a header: the standard library would take that for the end
    (tmp_path / "cut.tar").write_bytes(bytes(damaged))
    assert "is not a complete tar file (it is cut off or damaged" in refused(tmp_path / "cut.tar")
    lonely = write_archive(tmp_path / "b.tar", [("x.png", make_image(1)[1])])
    assert "x in archive" in refused(lonely) and "has no class" in refused(lonely)
    assert "has no images with classes" in refused(write_archive(tmp_path / "c.tar", [("x.bin", b"1")]))
    (tmp_path / "names").write_text("cat\n")
    assert "has the class '1', which" in refused(tmp_path / "a.tar", "--classes", tmp_path / "names")

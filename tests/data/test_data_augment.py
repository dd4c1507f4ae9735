"""Augmented images: cropped and mirrored in a way that depends on seed, epoch and sample alone."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.data.on_device import Augment
from mpitrain.errors import InputError
from mpitrain.trainer.data import augment_of, batches

IMAGES = np.random.default_rng(0).integers(1, 256, (50, 3, 8, 6)).astype(np.uint8)


@pytest.mark.parametrize("layout", ["channels first", "channels last", "grey"])
def test_augmented_images_are_crops_of_padded_and_mirrored_ones(layout):
    ids = np.arange(400)
    x = torch.arange(1.0, 400 * 1 * 8 * 6 + 1).reshape(400, 1, 8, 6).expand(-1, 3, -1, -1).contiguous()
    images = {"channels first": x, "channels last": x.movedim(1, -1).contiguous(), "grey": x[:, 0].contiguous()}[layout]
    out = Augment(("crop", "flip"), 2, seed=3)(images, ids, ids * 0)
    assert out.shape == images.shape
    turned = {"channels first": lambda t: t, "channels last": lambda t: t.movedim(-1, 1), "grey": lambda t: t[:, None]}
    got = turned[layout](out).expand_as(x)
    padded = functional.pad(x, (2, 2, 2, 2))
    crop_keys = set()
    for image, whole in zip(got, padded, strict=True):
        crops = {(r, c, f): whole[:, r : r + 8, c : c + 6].flip(-1) if f else whole[:, r : r + 8, c : c + 6]
                 for r in range(5) for c in range(5) for f in (False, True)}  # fmt: skip
        crop_keys.update(key for key, crop in crops.items() if torch.equal(crop, image))
    assert len(crop_keys) == 50  # each of the 5 x 5 places, mirrored and not, comes in 400 images


def test_augmentation_depends_only_on_seed_epoch_and_sample(arrays_set):
    folder = arrays_set(IMAGES, np.arange(50) % 2)
    data = open_dataset(folder)
    sections = {"data": {"augment": ["crop", "flip"], "workers": 2}, "train": {"batch": 12}, "run": {"seed": 7}}
    config = Config.from_dict(sections)

    def stream(ranks, position=0, config=config):
        """Return {running position: image} of ten batches, over the shares of all ranks."""
        images = {}
        for rank in range(ranks):
            share = lambda n, rank=rank: (n * rank // ranks, n * (rank + 1) // ranks)  # noqa: E731
            with batches(config, share, data, position) as loader:
                for _ in range(10):
                    batch = next(loader)
                    images |= {batch.position + share(12)[0] + i: (int(batch.ids[i]), x) for i, x in enumerate(batch.x)}
        return images

    alone = stream(1)
    for other in (stream(3), stream(5, position=24), stream(1, position=36)):
        common = alone.keys() & other.keys()
        assert len(common) >= 84 and all(
            alone[place][0] == other[place][0] and torch.equal(alone[place][1], other[place][1]) for place in common
        )
    epochs = {place: {alone[place][0]: alone[place][1]} for place in alone}
    first = {n: x for place in range(50) for n, x in epochs[place].items()}
    second = {n: x for place in range(50, 100) for n, x in epochs[place].items()}
    assert sum(torch.equal(first[n], second[n]) for n in first) < 10  # an epoch draws anew
    plain = stream(1, config=Config.from_dict({"train": {"batch": 12}, "run": {"seed": 7}}))
    assert all(torch.equal(x, torch.from_numpy(data.read(np.array([n]))[0][0])) for n, x in plain.values())


def test_augmentation_of_other_data_than_images_is_refused(arrays_set, tokens_set):
    tokens = open_dataset(tokens_set(1000)[0], sequence=10)
    images = open_dataset(arrays_set(IMAGES, np.arange(50) % 2))
    rows = open_dataset(arrays_set(np.ones((20, 5), np.float32), np.arange(20) % 2, name="rows"))
    crop = augment_of(Config.from_dict({"data": {"augment": ["crop"]}}))
    crop.check(images.description)
    for data, words in ((tokens, "the data are tokens"), (rows, "float32 of shape (5,)")):
        with pytest.raises(InputError, match="augment is for images") as caught:
            crop.check(data.description)
        assert words in str(caught.value)
    with pytest.raises(InputError, match="moves images of 8x6 out of view; set it to less than 6"):
        Augment(("crop",), 6, 1).check(images.description)

"""data.factory: the user's torch data sets give the same training on any number of ranks, and after restarts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from train.jobs import run
from train.user_data import HELD_OUT, SAMPLES, Points, Stream, noisy

from mpitrain.config.settings import Config
from mpitrain.data.order import SampleOrder
from mpitrain.data.user_dataset import UserAugment, open_factory, sample_seed
from mpitrain.errors import InputError

STEPS, BATCH = 8, 5  # more than an epoch, whose end lies within a batch
DATA = {
    "points": {"factory": "train.user_data:points"},
    "noise": {"factory": "train.user_data:points", "options": {"noise": 0.3}},
    "stream": {"factory": "train.user_data:stream", "workers": 3},
    "collated": {"factory": "train.user_data:collated"},
    "augmented": {"factory": "train.user_data:points", "augment": ["train.user_data:noisy"], "workers": 2},
}


def train(comm, folder: Path, data, steps=STEPS, **sections):
    return run(
        comm,
        folder,
        data={"record_ids": True, **data},
        model={"name": "mlp", "width": 8, "dropout": 0.1},
        train={"steps": steps, "batch": BATCH, "evaluate_every": 2, **sections.get("train", {})},
        checkpoint={"every": 2},
        optim={"schedule": "constant"},
        run={"reproducible": True, "workers": 4, "dir": str(folder)},
    )


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("user-data"))))


@pytest.mark.ranks(1, 2, 4)
def test_losses_are_the_same_on_any_number_of_ranks_and_after_a_restart_within_an_epoch(world, place):
    alone = world.subgroup([0])
    for name, data in list(DATA.items())[1:]:  # plain points are also those of "augmented"
        reference = train(alone, place / f"{name}-alone-{world.size}", data) if alone is not None else None
        reference = world.broadcast_object(reference)
        folder = place / f"{name}-{world.size}"
        train(world, folder, data, 3)
        lines = train(world, folder, data)
        for key in ("loss", "ids", "held_out_loss"):
            mine, theirs = ([line.get(key) for line in each[4:]] for each in (lines, reference))
            assert mine == theirs, (name, key)
        assert [line["loss"] for line in lines] == [line["loss"] for line in reference], name


@pytest.mark.ranks(2)
def test_data_that_differs_between_ranks_is_refused_on_all(world, place):
    with pytest.raises(InputError, match="gives other samples on rank 1 than on rank 0"):
        train(world, place / "differs", {"factory": "train.user_data:by_rank"})


def opened(split="train", **data):
    return open_factory(Config.from_dict({"data": data}), split)


def test_samples_follow_the_order_of_prepared_data_and_collate_functions_are_used():
    x, y = opened(**DATA["collated"]).read(ids := SampleOrder(SAMPLES, 1).ids(0, 7))
    direct = Points(SAMPLES, 0.0)
    assert np.array_equal(x, direct.points[torch.from_numpy(ids)]) and x.dtype == np.float32
    assert y.tolist() == [direct[number][1] for number in ids.tolist()] and y.dtype == np.int64
    description = opened(**DATA["collated"]).description
    assert (description.samples, description.classes) == (SAMPLES, ("a", "b", "c", "d"))


def test_random_transforms_depend_on_seed_epoch_and_sample_alone_and_leave_the_generators_alone():
    data = opened(**DATA["noise"])
    assert data.draws and not opened(**DATA["points"]).draws
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    ids = np.arange(6)
    whole = data.read_at(ids, ids)[0]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert np.array_equal(data.read_at(ids[3:], ids[3:] + 1)[0], whole[3:])  # the same epoch
    assert not np.array_equal(data.read_at(ids, ids + SAMPLES)[0], whole)
    assert len({sample_seed(s, e, n) for s in range(9) for e in range(9) for n in range(9)}) == 729


def test_a_stream_begins_again_in_the_next_epoch_and_at_any_position():
    data, expected = opened(**DATA["stream"]), []
    for epoch in range(3):
        one = Stream(SAMPLES)
        one.set_epoch(epoch)
        expected += [x for x, _ in one]
    for first, count in ((0, 5), (5, 5), (40, 9), (2, 3)):
        x, _ = data.read(np.arange(first, first + count))
        assert np.array_equal(x, torch.stack(expected[first : first + count])), first
    assert len(opened("held_out", **DATA["stream"])) == HELD_OUT


def test_augmentation_functions_get_a_generator_of_their_own():
    from mpitrain.data.dataset import Batch

    augment, x = UserAugment(("train.user_data:noisy",), 1), torch.zeros(4, 3)
    ids = np.array([7, 1, 7, 3])
    changed, _ = augment(Batch(ids, x, torch.zeros(4), 0), np.array([0, 0, 1, 0]))
    generator = torch.Generator().manual_seed(sample_seed(1, 1, 7))
    assert torch.equal(changed[2], noisy(x[2], x[2], generator)[0]) and not torch.equal(changed[0], changed[2])
    augment.check(opened(**DATA["points"]))
    for other in ("noisy_by_rank", "noisy_by_call"):
        with pytest.raises(InputError, match=f"{other} draws random numbers that differ between ranks"):
            UserAugment((f"train.user_data:{other}",), 1).check(opened(**DATA["points"]))


WRONG = {
    "raises": "raised ValueError: no such disk (user_data.py:",
    "none": "returned NoneType for 'train'; return a torch Dataset or IterableDataset",
    "number": "returned int for 'train'",
    "single": "a batch is Tensor, not a pair (x, y); return (data set, collate function)",
    "words": "x is not an array",
    "empty": "has no samples or no length",
    "own generator": "a sample differs when it is read again, so it would differ between numbers of ranks; draw",
    "sample": "collating samples from 0 on raised RuntimeError: stack expects each tensor to be equal size",
}


@pytest.mark.parametrize("how", WRONG)
def test_unsuitable_data_is_refused_in_one_line(how):
    with pytest.raises(InputError) as refused:
        opened(factory="train.user_data:wrong", options={"how": how})
    assert WRONG[how] in str(refused.value) and "\n" not in str(refused.value)


def test_a_broken_sample_and_conflicting_settings_are_named():
    data = opened(factory="train.user_data:wrong", options={"how": "broken"})
    with pytest.raises(InputError, match=r"sample 5 raised OSError: the disk is gone \(user_data\.py:\d+\)"):
        data.read(np.array([3, 5, 6]))
    assert opened("held_out", factory="train.user_data:only_train") is None
    for section, message in (
        ({"factory": "a:b", "path": "digits"}, "data.factory and data.path are both set"),
        ({"options": {"x": 1}}, "are for data.factory, which is not set"),
        ({"augment": ["flop"]}, "unknown augmentation 'flop'; did you mean 'flip'"),
    ):
        with pytest.raises(InputError, match=message):
            Config.from_dict({"data": section})

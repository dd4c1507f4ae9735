"""Data sets mixed by weight: exact shares at every step, each in its own order, on any number of ranks."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.config.settings import Config
from mpitrain.data import Loader, SampleOrder, evaluation_batches, open_dataset, open_mix
from mpitrain.data.mix import MixedOrder, Weights
from mpitrain.errors import InputError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=7))
def test_every_prefix_has_each_data_set_by_its_weight_to_within_one_sample(parts):
    weights = Weights([float(part) for part in parts])
    pattern = weights.pattern
    for number, part in enumerate(weights.parts):
        counts = np.cumsum(pattern == number)
        targets = np.arange(1, len(pattern) + 1) * part
        assert (abs(counts * weights.period - targets) < weights.period).all()
        assert counts[-1] == part


def test_weights_are_exact_decimals():
    assert Weights([0.7, 0.3]).parts == (7, 3)
    assert Weights([2, 1]).parts == (2, 1)
    assert Weights([0.1, 0.1, 0.2]).parts == (1, 1, 2)
    with pytest.raises(InputError, match="use weights with fewer digits"):
        Weights([0.123456789, 0.5])


def test_each_data_set_of_a_mix_keeps_its_own_order_and_epochs():
    sizes, weights = (100, 9), Weights([0.7, 0.3])
    order = MixedOrder(sizes, weights, seed=4)
    ids = order.ids(0, 1000)
    for number, (size, first) in enumerate(zip(sizes, (0, 100), strict=True)):
        own_ids = ids[(ids >= first) & (ids < first + size)] - first
        assert len(own_ids) == (700, 300)[number]
        assert own_ids.tolist() == SampleOrder(size, 4).ids(0, len(own_ids)).tolist()
    pieces = [order.ids(start, 7) for start in range(0, 994, 7)]
    assert np.concatenate(pieces).tolist() == ids[:994].tolist()
    far = 10**12 + 3
    assert order.ids(far, 20).tolist() == MixedOrder(sizes, weights, 4).at(np.arange(far, far + 20)).tolist()


@pytest.fixture
def two_sets(tokens_set):
    """Return two data sets of 10 tokens a sample, with 90 and 15 samples, some held out."""
    return tokens_set(901 + 100, held_out=0.1, name="large")[0], tokens_set(170, held_out=0.12, name="small")[0]


def open_mixed(two_sets, split="train", **how):
    large, small = two_sets
    return open_mix({str(large): 0.8, str(small): 0.2}, split, find=Path, sequence=10, **how)


def test_batches_are_the_same_on_any_ranks_and_from_any_step(two_sets):
    data = open_mixed(two_sets)
    sets = [open_dataset(folder, sequence=10) for folder in two_sets]
    first = len(sets[0])

    def share(rank, ranks, size):
        return size * rank // ranks, size * (rank + 1) // ranks

    def read(ranks, position, steps):
        """Return (ids, x, y) of global batches of 13."""
        batches = []
        loaders = [
            Loader(
                data, data.order(3), batch=13, share=partial(share, rank, ranks), position=position, workers=rank % 2
            )
            for rank in range(ranks)
        ]
        for _ in range(steps):
            parts = [next(loader) for loader in loaders]
            batches.append([np.concatenate([getattr(part, key) for part in parts]) for key in ("ids", "x", "y")])
        for loader in loaders:
            loader.close()
        return batches

    whole = read(1, 0, 12)
    for ranks in (2, 3):
        for one, other in zip(whole, read(ranks, 0, 5) + read(1, 65, 2) + read(ranks, 91, 5), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    for ids, x, y in whole:
        for number, inputs, targets in zip(ids.tolist(), x, y, strict=True):
            part, local = (0, number) if number < first else (1, number - first)
            own_x, own_y = sets[part].read(np.array([local]))
            assert np.array_equal(inputs, own_x[0])
            assert np.array_equal(targets, own_y[0])


def test_held_out_samples_follow_the_weights(two_sets):
    held_out = open_mixed(two_sets, "held_out")
    sizes = [len(open_dataset(folder, "held_out", sequence=10)) for folder in two_sets]
    share = lambda size: (0, size)  # noqa: E731
    ids = np.concatenate([b.ids for b in evaluation_batches(held_out, samples=5, batch=2, share=share)])
    assert (ids < sizes[0]).sum() == 4
    assert len(set(ids.tolist())) == 5
    every = np.concatenate([b.ids for b in evaluation_batches(held_out, samples=99, batch=4, share=share)])
    assert sorted(every.tolist()) == list(range(sum(sizes)))  # a small set that has no more gives way


def test_the_identity_depends_on_contents_and_weights(two_sets, tmp_path):
    large, small = two_sets
    identity = open_mixed(two_sets).description.identity
    moved = large.rename(tmp_path / "elsewhere")
    same = open_mix({str(moved): 8, str(small): 2}, find=Path, sequence=10)
    other = open_mix({str(moved): 0.7, str(small): 0.3}, find=Path, sequence=10)
    assert same.description.identity == identity != other.description.identity


def test_data_sets_with_different_tokenizers_or_end_tokens_are_refused(tmp_path, command):
    for name, words in (("a", "one two three"), ("b", "vier fuenf sechs")):
        (tmp_path / f"{name}.txt").write_text(f"{words}\n" * 200)
        source, file = tmp_path / f"{name}.txt", tmp_path / f"{name}.json"
        assert command("tokenizer", source, "--out", file, "--vocabulary", 270)[0] == 0
        for end in ("<|endoftext|>", "Ġ"):
            flags = ("--tokenizer", file, "--end-token", end, "--out", tmp_path / f"{name}{end == 'Ġ'}")
            assert command("prepare", source, *flags)[0] == 0
    both = {"a": 1.0, "b": 1.0}
    with pytest.raises(InputError, match="have different tokenizers; prepare them with the same --tokenizer"):
        open_mix(both, find=lambda name: tmp_path / f"{name}False", sequence=8)
    ends = {"False": 1.0, "True": 1.0}
    assert open_mix(ends, find=lambda name: tmp_path / f"a{name}", sequence=8).description.document_end is None
    with pytest.raises(InputError, match="end with different tokens"):
        open_mix(ends, find=lambda name: tmp_path / f"a{name}", sequence=8, apart=True)


def test_incompatible_data_sets_are_refused(two_sets, tmp_path, arrays_set):
    large, _ = two_sets
    arrays = arrays_set(np.zeros((9, 3), np.float32), np.zeros(9, np.float32))
    with pytest.raises(InputError, match=r"have different shapes, types or classes \(tokens \[10\]"):
        open_mix({str(large): 1, str(arrays): 1}, find=Path, sequence=10)
    with pytest.raises(InputError, match="both name the data; put the path among those"):
        Config.from_dict({"data": {"path": "a", "mix": {"b": 1.0}}})
    with pytest.raises(InputError, match="greater than 0"):
        Config.from_dict({"data": {"mix": {"b": 0}}})
    with pytest.raises(InputError, match="does not say which token ends a document"):
        open_mixed(two_sets, apart=True)
    config = Config.from_args(["--data.mix", '{"a/b" = 0.7, "c" = 0.3}'])
    assert (
        config.data.mix == {"a/b": 0.7, "c": 0.3} == Config.from_args(["--data.mix", '{"a/b": 0.7, "c": 0.3}']).data.mix
    )

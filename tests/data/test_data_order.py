"""The order of samples: one permutation per epoch, the same on any number of ranks and in any version."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data.order import SampleOrder, mix64

SEEDS = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize("samples", [*range(1, 40), 99, 100, 101, 1023, 1024, 1025, 65537])
def test_an_epoch_is_a_permutation(samples):
    for seed in (0, 7):
        assert np.array_equal(np.sort(SampleOrder(samples, seed).ids(0, samples)), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_any_epoch_of_any_size_is_a_permutation(samples, seed, epoch):
    ids = SampleOrder(samples, seed).ids(epoch * samples, samples)
    assert np.array_equal(np.sort(ids), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 50), batch=st.integers(1, 70), ranks=st.integers(1, 9), seed=SEEDS)
def test_each_sample_occurs_once_per_epoch_for_any_batch_and_ranks(samples, batch, ranks, seed):
    order, epochs = SampleOrder(samples, seed), 4
    ids = []
    for position in range(0, epochs * samples, batch):
        for rank in range(ranks):
            start, stop = batch * rank // ranks, batch * (rank + 1) // ranks
            ids += order.ids(position + start, stop - start).tolist()
    for epoch in range(epochs):
        assert sorted(ids[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert ids == order.ids(0, len(ids)).tolist()


def test_the_order_never_changes_between_versions():
    assert SampleOrder(10, 1).ids(0, 20).tolist() == [4, 6, 9, 1, 7, 5, 3, 8, 0, 2, 2, 7, 5, 0, 3, 1, 9, 4, 6, 8]
    large = [140247883955, 85333116517, 651069700719, 501914377146]
    assert SampleOrder(10**12, 2**62 + 5).ids(3 * 10**12 - 2, 4).tolist() == large


def test_epochs_and_seeds_differ():
    order = SampleOrder(1000, 3)
    first, second = order.ids(0, 1000), order.ids(1000, 1000)
    assert (first == second).sum() < 20
    assert (first == SampleOrder(1000, 4).ids(0, 1000)).sum() < 20
    assert (first == np.arange(1000)).sum() < 20


def test_neighbours_are_separated():
    ids = SampleOrder(10_000, 5).ids(0, 10_000)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(10_000), ids)[0, 1]) < 0.03


def test_every_permutation_of_few_samples_is_about_equally_likely():
    frequencies = Counter(tuple(SampleOrder(4, seed).ids(0, 4)) for seed in range(2400))
    assert len(frequencies) == 24  # 100 of each on average
    assert min(frequencies.values()) > 60
    assert max(frequencies.values()) < 145


def test_the_largest_sizes_and_positions_do_not_overflow():
    order = SampleOrder(2**62, 2**63 - 1)
    ids = order.ids(2**62 - 3, 6)
    assert ids.dtype == np.int64
    assert ((ids >= 0) & (ids < 2**62)).all()
    assert len(set(ids.tolist())) == 6


def test_a_count_of_zero_gives_an_empty_array():
    assert SampleOrder(5, 0).ids(3, 0).tolist() == []


@pytest.mark.parametrize(("samples", "seed"), [(0, 0), (-1, 0), (2**62 + 1, 0), (5, -1), (5, 2**63)])
def test_sizes_and_seeds_out_of_range_are_refused(samples, seed):
    with pytest.raises(ValueError, match="must be from"):
        SampleOrder(samples, seed)


def test_the_mixing_function_is_the_published_one():
    # SplitMix64 from seed 0: its first outputs mix multiples of the golden constant
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = golden * np.arange(1, 4, dtype=np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix64(states).tolist() == expected

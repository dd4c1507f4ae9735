"""The data loader: each rank's share of each batch, read ahead by threads, from any position, with errors and ends."""

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import PATIENCE

from mpitrain.data import Loader, SampleOrder, evaluation_batches, open_dataset
from mpitrain.data.on_device import on_device, pin
from mpitrain.errors import InputError


def share_of(rank, ranks):
    return lambda size: (size * rank // ranks, size * (rank + 1) // ranks)


ALL = share_of(0, 1)


@pytest.fixture
def tokens(tokens_set):
    folder, content = tokens_set(1001, shard=300)
    return open_dataset(folder, sequence=10), content


class Slow:
    """Data set with slow reads, which it counts."""

    def __init__(self, data, seconds):
        self.data, self.seconds, self.reads = data, seconds, []

    def __len__(self):
        return len(self.data)

    def read_at(self, ids, positions):
        self.reads.append(ids)
        time.sleep(self.seconds(len(self.reads)))
        return self.data.read(ids)

    def close(self):
        self.data.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_follow_the_order_of_the_seed(tokens, workers):
    data, content = tokens
    order = SampleOrder(len(data), 5)
    with Loader(data, order, batch=32, share=ALL, workers=workers) as loader:
        for step in range(10):
            batch = next(loader)
            assert batch.position == 32 * step
            assert batch.ids.tolist() == order.ids(32 * step, 32).tolist()
            assert (batch.x.dtype, batch.y.dtype) == (torch.int64, torch.int64)
            for i, x, y in zip(batch.ids, batch.x, batch.y, strict=True):
                assert np.array_equal(x, content[10 * i : 10 * i + 10])
                assert np.array_equal(y, content[10 * i + 1 : 10 * i + 11])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4),
    batch=st.integers(1, 130),
    seed=st.integers(0, 100),
)
def test_resuming_on_other_numbers_of_ranks_loses_and_repeats_nothing(tokens, legs, batch, seed):
    """Run some steps on some number of ranks, and pass only the position on to the next number of ranks."""
    data, _ = tokens
    order, position, ids = SampleOrder(len(data), seed), 0, []
    for ranks, steps in legs:
        loaders = [
            Loader(data, order, batch=batch, share=share_of(rank, ranks), position=position, workers=rank % 2)
            for rank in range(ranks)
        ]
        for _ in range(steps):
            for loader in loaders:
                got = next(loader)
                assert got.position == position
                ids += got.ids.tolist()
            position += batch
        for loader in loaders:
            loader.close()
    assert len(ids) == position
    epochs, remainder = divmod(position, len(data))
    for epoch in range(epochs):
        assert sorted(ids[epoch * len(data) : (epoch + 1) * len(data)]) == list(range(len(data)))
    assert len(set(ids[epochs * len(data) :])) == remainder


def test_slow_reads_come_in_order(tokens):
    data, _ = tokens
    slow = Slow(data, lambda number: 0.03 if number % 3 == 1 else 0.0)
    order = SampleOrder(len(data), 5)
    with Loader(slow, order, batch=4, share=ALL, workers=3, prefetch=6) as loader:
        positions = [next(loader).position for _ in range(12)]
    assert positions == list(range(0, 48, 4))


def test_the_number_of_batches_read_ahead_is_bounded(tokens):
    data, _ = tokens
    slow = Slow(data, lambda _: 0.0)
    with Loader(slow, SampleOrder(len(data), 5), batch=4, share=ALL, workers=2, prefetch=3) as loader:
        next(loader)
        until = time.monotonic() + 30 * PATIENCE
        while len(slow.reads) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(slow.reads) == 4  # the one given out and three ahead


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_error_is_raised_at_its_batch(tokens_set, workers):
    folder, _ = tokens_set(1001, shard=300)
    last = folder / "train-00003.h5"
    content = bytearray(last.read_bytes())
    place = bytes(content).index((np.arange(900, 1001) % 251 + 1).astype(np.uint8).tobytes())
    content[place + 50] ^= 1
    last.write_bytes(content)
    data, order = open_dataset(folder, sequence=10), SampleOrder(100, 5)
    bad = next(step for step in range(100) if order.ids(step, 1)[0] >= 90)
    with Loader(data, order, batch=1, share=ALL, workers=workers) as loader:
        for step in range(bad):
            assert next(loader).position == step
        with pytest.raises(InputError, match=r"train-00003.h5 field tokens, extent 0 .* is damaged"):
            next(loader)


def test_closing_stops_the_threads_promptly(tokens):
    data, _ = tokens
    slow = Slow(data, lambda _: 0.3)
    loader = Loader(slow, SampleOrder(len(data), 5), batch=4, share=ALL, workers=2, prefetch=50)
    next(loader)
    loader.close()
    assert len(slow.reads) < 25  # of 50 that it may read ahead
    assert not [thread for thread in threading.enumerate() if "data-reader" in thread.name]
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_samples_gets_empty_tensors(arrays_set, workers):
    data = open_dataset(arrays_set(np.zeros((9, 3, 2), np.uint8), np.arange(9)))
    with Loader(data, SampleOrder(9, 1), batch=2, share=lambda _: (2, 2), workers=workers) as loader:
        for step in range(3):
            batch = next(loader)
            assert (batch.x.shape, batch.y.shape, batch.ids.shape) == ((0, 3, 2), (0,), (0,))
            assert (batch.x.dtype, batch.y.dtype) == (torch.float32, torch.int64)
            assert batch.position == 2 * step


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("samples", "batch", "sizes"), [(25, 10, [10, 10, 5]), (1000, 60, [60, 40]), (3, 10, [3])])
def test_evaluation_is_spread_evenly_with_a_ragged_last_batch(tokens, ranks, samples, batch, sizes):
    data, content = tokens
    parts = [
        list(evaluation_batches(data, samples=samples, batch=batch, share=share_of(rank, ranks)))
        for rank in range(ranks)
    ]
    assert {len(part) for part in parts} == {len(sizes)}
    ids = []
    for step, size in enumerate(sizes):
        batches = [part[step] for part in parts]
        assert sum(len(one.ids) for one in batches) == size
        assert {one.position for one in batches} == {sum(sizes[:step])}
        for one in batches:
            ids += one.ids.tolist()
            for i, x in zip(one.ids, one.x, strict=True):
                assert np.array_equal(x, content[10 * i : 10 * i + 10])
    count = min(samples, len(data))
    assert ids == [place * len(data) // count for place in range(count)]


def test_loading_costs_the_training_thread_little(tokens_set):
    """Check that a batch of 32 x 128 tokens costs the training thread under 1 ms, 2 % of a step of 50 ms."""
    folder, _ = tokens_set(2_000_000)
    data = open_dataset(folder, sequence=128)
    with Loader(data, SampleOrder(len(data), 1), batch=32, share=ALL, workers=1) as loader:
        next(loader)
        before = time.thread_time()
        for _ in range(200):
            next(loader)
        assert (time.thread_time() - before) / 200 < 1e-3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_device_gets_the_samples_that_the_host_reads(tokens, device, workers):
    """Check that no batch is used before it has arrived on the device."""
    data, _ = tokens
    sums, expected = [], []
    for where, results in ((device, sums), (torch.device("cpu"), expected)):
        order = SampleOrder(len(data), 5)
        with Loader(data, order, batch=32, share=ALL, workers=workers, finish=partial(pin, to=where)) as loader:
            for batch, _ in zip(on_device(loader, where), range(12), strict=False):
                assert batch.x.device == batch.y.device == where
                results.append((batch.ids.tolist(), (batch.x * 3 + batch.y).double().sum()))
    assert [ids for ids, _ in sums] == [ids for ids, _ in expected]
    assert [float(each) for _, each in sums] == [float(each) for _, each in expected]


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_batches_of_any_structure_are_copied_ahead_and_errors_keep_their_order(device):
    drawn = []

    def batches():
        for number in range(4):
            drawn.append(number)
            yield {"x": torch.full((3,), float(number)), "of": [(torch.tensor(number), "name")]}
        raise InputError("no more")

    coming = on_device(batches(), device, ahead=2)
    for number in range(4):
        batch = next(coming)
        assert len(drawn) == min(number + 3, 4)
        ((label, name),) = batch["of"]
        assert batch["x"].tolist() == [number] * 3 and (int(label), name) == (number, "name")
    with pytest.raises(InputError, match="no more"):
        next(coming)
    assert list(on_device(iter([]), device)) == []

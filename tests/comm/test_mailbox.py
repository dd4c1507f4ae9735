"""Mailboxes: letters from any rank to any rank, received by a thread that cannot know who posts next."""

from __future__ import annotations

import random
import re
import threading
import time

import pytest
import torch
from ranks_apart import failed_job, line, rows
from support import next_handle

from mpitrain.errors import CommunicationError, InputError

MANY = pytest.mark.ranks(2, 3)
SIZES = (0, 1, 5000, 3 << 20)  # bytes


@pytest.fixture
def box(world):
    mailbox = world.mailbox("test")
    yield mailbox
    mailbox.free()


def data(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@MANY
def test_letters_of_every_size_arrive_in_order_at_all_ranks(world, box):
    large = 2**53 - 1
    for dest in range(world.size):
        for number, nbytes in enumerate(SIZES):
            box.post(dest, [number, large, 0.1], data(nbytes, world.rank) if number else None)
        box.post(dest, [])
    expected = dict.fromkeys(range(world.size), 0)
    for _ in range(world.size * (len(SIZES) + 1)):
        letter = box.wait(range(world.size), "letters")
        number, nbytes = expected[letter.source], [*SIZES, 0][expected[letter.source]]
        assert letter.payload_bytes == nbytes
        assert letter.words == ([number, large, 0.1] if number < len(SIZES) else [])
        place = torch.empty(nbytes, dtype=torch.uint8)
        work = letter.receive(place)
        work.wait()
        assert work.done() and place.equal(data(nbytes, letter.source))
        expected[letter.source] += 1
    begun = time.monotonic()
    assert box.take(0) is None and box.take(0.05) is None and time.monotonic() - begun >= 0.05


@MANY
def test_invalid_letters_are_refused_with_the_reason(world, box):
    for call, words in (
        (lambda: box.post(world.size, [1]), "no rank"),
        (lambda: box.post(0, range(16)), "a letter of 16 words is too long; send at most 15"),
        (lambda: box.post(0, [], torch.ones(4, 4).t()[1:]), "not contiguous"),
        (lambda: box.post(0, [], torch.ones(3, device="meta")), "meta has no data"),
    ):
        with pytest.raises(InputError, match=words):
            call()
    other = (world.rank + 1) % world.size
    posted = [box.post(other, [n], data(3 << 20, n)) for n in range(2)]
    letter = box.wait([other], "the wrong one")
    message = rf"letter from rank {letter.source} has a payload of 3145728 bytes, but rank {world.rank} expects 400;"
    with pytest.raises(CommunicationError, match=message):
        letter.receive(torch.empty(100))
    place = torch.empty(3 << 20, dtype=torch.uint8)
    box.wait([other], "the right one").receive(place).wait()
    assert place.equal(data(3 << 20, 1))
    for work in posted:  # also the one that nobody wanted
        work.wait()
        assert work.done()


@MANY
def test_serving_threads_lose_none_of_many_random_letters(world):
    """Each rank asks random ranks, itself included, for sums of random payloads, and a thread of that rank answers."""
    questions, answers = world.mailbox("questions"), world.mailbox("answers")
    count, chance = 1000 // world.size, random.Random(world.rank)
    served: list[int] = []

    def serve() -> None:
        finished = 0
        while finished < world.size:
            letter = questions.take(5.0)
            assert letter is not None
            if not letter.words:
                finished += 1
                continue
            place = torch.empty(letter.payload_bytes // 8, dtype=torch.float64)
            letter.receive(place).wait()
            answers.post(letter.source, [*letter.words, float(place.sum())], place)
            served.append(letter.source)

    server = threading.Thread(target=serve)
    server.start()
    waiting: dict[int, torch.Tensor] = {}
    for number in range(count + 8):
        if number < count:
            length = chance.choice((0, 1, 100, 1000, 10_000) if number % 50 else (100_000,))
            waiting[number] = torch.arange(length, dtype=torch.float64) + number
            questions.post(chance.randrange(world.size), [number], waiting[number])
        while len(waiting) > (8 if number < count else count + 7 - number):
            letter = answers.wait(range(world.size), "an answer")
            x = waiting.pop(int(letter.words[0]))
            back = torch.empty_like(x)
            letter.receive(back).wait()
            assert back.equal(x) and letter.words[1] == x.sum()
    for rank in range(world.size):
        questions.post(rank, [])
    server.join(30)
    assert not server.is_alive() and answers.take(0) is None
    counts = torch.tensor([len(served), count])
    world.all_reduce(counts)
    assert counts[0] == counts[1]
    questions.free()
    answers.free()


@MANY
def test_a_freed_mailbox_discards_pending_letters_and_leaves_nothing_in_mpi(world):
    numbers = set()
    for _ in range(5):
        box = world.mailbox("short")
        for rank in range(world.size):
            box.post(rank, [1], data(1 << 20, 0))
            box.post(rank, [2])
        box.free()
        box.free()
        numbers.add(next_handle(world))
    assert len(numbers) <= 2
    with pytest.raises(InputError, match="was freed"):
        box.post(0, [1])


def test_waiting_for_a_stopped_rank_ends_the_job(tmp_path):
    report = failed_job(
        tmp_path,
        3,
        """
        import os, signal, threading
        questions, answers = world.mailbox("questions"), world.mailbox("answers")
        def serve():
            while True:
                letter = questions.take(60)
                if world.rank == 1 and letter.words[0] == 7:
                    os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(60)  # the signal may stop other threads first
                answers.post(letter.source, letter.words)
        threading.Thread(target=serve, daemon=True).start()
        def request(rank, word):
            questions.post(rank, [word])
            assert answers.wait([rank], "pull").words == [word]  # waits
        if world.rank == 0:
            request(2, 1)
            request(1, 7)
        time.sleep(60)  # the server of rank 2 is idle for longer than an operation may take
        """,
    )
    assert re.search(r"world: mailbox answers: pull #\d did not complete in 3 s \(comm.timeout\)", report), report
    table = rows(report)
    assert re.match(r"world: mailbox answers: pull #\d, 3 s", table[0]) and line(tmp_path, "# waits") in table[0]
    assert table[1] == "does not answer: stopped, dead or cut off"
    assert table[2].startswith("not in an operation")

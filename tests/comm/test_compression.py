"""Compressed all-reduces: their results, the errors they carry over, and the bytes they send."""

from __future__ import annotations

import math

import pytest
import torch

from mpitrain.comm import compression
from mpitrain.comm.compression import BF16, FP16, Int4, Int8, PowerSGD, TopK, from_name
from mpitrain.comm.compression.powersgd import plan
from mpitrain.comm.programs.program import tree_order
from mpitrain.errors import InputError

ALL = pytest.mark.ranks(1, 2, 3)
MANY = pytest.mark.ranks(2, 3)
KINDS = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int4": lambda: Int4(64),
    "topk": lambda: TopK(0.1),
    "powersgd": lambda: PowerSGD(2, min_compression=0),
}
every_kind = pytest.mark.parametrize("kind", KINDS)

# a bucket of a 12 x 20 and a 4 x 3 x 5 parameter, a bias and gaps of zeros
SHAPES = ((0, (12, 20)), (256, (13,)), (272, (4, 3, 5)))
NUMEL = 336


def gradient(numel: int, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(numel, generator=generator).to(dtype)


def bucket_gradient(rank: int, step: int) -> torch.Tensor:
    """Return gradients of the parameters in SHAPES; the gaps between them stay zero."""
    flat, whole = torch.zeros(NUMEL), gradient(NUMEL, rank, step)
    for lo, shape in SHAPES:
        flat[lo : lo + math.prod(shape)] = whole[lo : lo + math.prod(shape)]
    return flat


def is_same_on_all_ranks(world, x: torch.Tensor) -> bool:
    """Return True if all ranks have the same bits."""
    mine = x.contiguous().view(-1).view(torch.uint8).clone()
    everyone = torch.empty(mine.numel() * world.size, dtype=torch.uint8)
    world.all_gather(everyone, mine)
    return all(torch.equal(mine, theirs) for theirs in everyone.chunk(world.size)) if mine.numel() else True


@ALL
@pytest.mark.parametrize("kind", [FP16, BF16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_16_bit_compression_sums_in_fp32_and_rounds_once(world, kind, dtype):
    wire = kind.wire
    compressed = kind()
    for numel in (0, 1, 7, 1001, 300_001):
        for op in ("sum", "avg"):
            rounded = [gradient(numel, r, dtype=dtype).to(wire).float() for r in range(world.size)]
            total = tree_order(rounded, torch.add)
            expected = (total * (1.0 / world.size) if op == "avg" else total).to(wire).to(dtype)
            x = gradient(numel, world.rank, dtype=dtype)
            if world.size == 1:  # nothing is sent
                expected = x.clone()
            for algorithm in ("auto", "ring"):
                y = x.clone()
                world.all_reduce(y, op, algorithm, compression=compressed)
                assert torch.equal(y, expected)


@MANY
def test_an_average_in_fp16_overflows_only_where_a_value_does(world):
    x = torch.tensor([60000.0, -60000.0, 1.0])
    world.all_reduce(x, "avg", compression=FP16())
    assert x.tolist() == [60000.0, -60000.0, 1.0]
    x = torch.tensor([70000.0, 1.0])
    world.all_reduce(x, "avg", compression=FP16())
    assert x.tolist() == [math.inf, 1.0]


@ALL
@every_kind
def test_all_ranks_end_with_the_same_bits(world, kind):
    compressed = KINDS[kind]()
    for step in range(4):
        x = bucket_gradient(world.rank, step)
        world.all_reduce(x, "avg", compression=compressed.bucket("b", SHAPES))
        assert is_same_on_all_ranks(world, x)
        assert x[240:256].eq(0).all()  # gaps stay zero


@ALL
@every_kind
def test_empty_and_odd_sizes_on_any_number_of_ranks(world, kind):
    compressed = KINDS[kind]()
    for shape in ((0,), (1,), (3, 1), (7, 5), (1, 9), (0, 4)):
        x = gradient(math.prod(shape), world.rank).view(shape)
        before = x.clone()
        world.all_reduce(x, "sum", compression=compressed.bucket(str(shape)))
        assert x.shape == before.shape and x.isfinite().all() and is_same_on_all_ranks(world, x)
        if world.size == 1:
            assert torch.equal(x, before)


@MANY
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_topk_with_ratio_1_equals_the_exact_sum(world, op, dtype):
    compressed = TopK(1.0)
    for step in range(3):
        x = gradient(501, world.rank, step, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = gradient(501, 0, step, dtype).to(wide)
        for r in range(1, world.size):
            expected = expected + gradient(501, r, step, dtype).to(wide)
        if op == "avg":
            expected *= 1.0 / world.size
        world.all_reduce(x, op, compression=compressed.bucket("b"))
        assert torch.equal(x, expected.to(dtype))
    assert compressed.state_dict()["b/error"].eq(0).all()


@MANY
def test_topk_sends_the_largest_elements_of_each_rank(world):
    compressed = TopK(0.1, error_feedback=False)
    x = gradient(100, world.rank)
    expected = torch.zeros(100)
    for r in range(world.size):
        theirs = gradient(100, r)
        largest = theirs.abs().argsort(descending=True)[:10]
        expected[largest] += theirs[largest]
    world.all_reduce(x, compression=compressed)
    assert torch.equal(x, expected)
    assert compressed.state_dict() == {}


@MANY
def test_topk_error_is_exactly_what_was_not_sent(world):
    compressed, total = TopK(0.05), torch.zeros(400)
    whole = torch.zeros(400)
    for step in range(30):  # whole numbers: every sum is exact
        x = (gradient(400, world.rank, step) * 8).round()
        whole += sum((gradient(400, r, step) * 8).round() for r in range(world.size))
        world.all_reduce(x, compression=compressed.bucket("b"))
        total += x
        residual = compressed.state_dict()["b/error"].clone()
        world.all_reduce(residual)
        assert torch.equal(total + residual, whole)


@MANY
@pytest.mark.parametrize(
    "make", [lambda: TopK(0.1), lambda: PowerSGD(1, min_compression=0), lambda: PowerSGD(2, warm_start=False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_with_error_feedback_the_sum_of_many_steps_converges_to_the_true_sum(world, make, dtype):
    compressed, shapes = make(), [(0, (24, 20))]
    fixed = [gradient(480, r, dtype=dtype) for r in range(world.size)]
    mean = sum(g.double() for g in fixed) / world.size
    out, missing = torch.zeros(480, dtype=torch.float64), []
    for _ in range(200):
        x = fixed[world.rank].clone()
        world.all_reduce(x, "avg", compression=compressed.bucket("b", shapes))
        out += x.double()
        missing.append((out - mean * (len(missing) + 1)).norm() / mean.norm())
    # what is missing stays bounded (it does not grow with the steps), so the mean over the steps converges
    assert max(missing[100:]) < 1.5 * max(missing[:100])
    assert missing[-1] / len(missing) < 0.15
    residual = compressed.state_dict()["b/error"].double()
    world.all_reduce(residual, "avg")
    if dtype == torch.float32:  # in bf16 the results are rounded once more
        torch.testing.assert_close(out + residual, mean * 200, rtol=1e-4, atol=1e-3)


@MANY
def test_without_error_feedback_the_sum_of_many_steps_stays_wrong(world):
    compressed, shapes = PowerSGD(1, error_feedback=False, min_compression=0), [(0, (24, 20))]
    out, mean = torch.zeros(480), sum(gradient(480, r) for r in range(world.size)) / world.size
    for _ in range(50):
        x = gradient(480, world.rank)
        world.all_reduce(x, "avg", compression=compressed.bucket("b", shapes))
        out += x
    assert (out / 50 - mean).norm() > 0.5 * mean.norm()
    assert set(compressed.state_dict()) == {"b/right", "b/steps"}


@MANY
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (9, 9), (3, 40)])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_powersgd_of_full_rank_is_the_exact_reduction(world, shape, op):
    compressed = PowerSGD(min(shape) + 2, min_compression=0)
    for step in range(3):
        x = gradient(math.prod(shape), world.rank, step).view(shape)
        expected = sum(gradient(math.prod(shape), r, step).view(shape).double() for r in range(world.size))
        if op == "avg":
            expected /= world.size
        world.all_reduce(x, op, compression=compressed.bucket("m"))
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=2e-5)


@MANY
def test_powersgd_finds_the_best_approximation_of_a_fixed_average(world):
    """Warm-started subspace iteration converges to the truncated singular value decomposition."""
    decay = torch.tensor([10.0, 5.0, 2.0, 1.0, 0.5, 0.2]).diag()

    def matrix(r: int) -> torch.Tensor:
        left, right = gradient(30 * 6, 0).view(30, 6), gradient(6 * 25, 1).view(6, 25)
        return torch.linalg.qr(left).Q @ decay @ torch.linalg.qr(right.t()).Q.t() * (r + 1)

    average = sum(matrix(r) for r in range(world.size)) / world.size
    u, s, v = torch.linalg.svd(average)
    best = u[:, :2] @ s[:2].diag() @ v[:2]
    compressed = PowerSGD(2, error_feedback=False)
    for _ in range(20):
        x = matrix(world.rank)
        world.all_reduce(x, "avg", compression=compressed.bucket("m"))
    torch.testing.assert_close(x, best, rtol=1e-4, atol=1e-4)


@MANY
def test_small_parameters_and_vectors_of_a_bucket_are_reduced_exactly(world):
    compressed = PowerSGD(1, min_compression=2)  # 12 x 20: 32 numbers for 240; 4 x 15: 19 for 60
    expected = sum(bucket_gradient(r, 0) for r in range(world.size))
    x = bucket_gradient(world.rank, 0)
    world.all_reduce(x, compression=compressed.bucket("b", SHAPES))
    torch.testing.assert_close(x[240:272], expected[240:272], rtol=1e-6, atol=1e-6)
    assert (x[:240] - expected[:240]).norm() > 0.1 and torch.linalg.matrix_rank(x[:240].view(12, 20)) == 1
    exact = PowerSGD(8).bucket("b", SHAPES)  # no parameter becomes half as large
    y = bucket_gradient(world.rank, 0)
    world.all_reduce(y, compression=exact)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@MANY
@pytest.mark.parametrize("kind", ["topk", "powersgd"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_gradient_reaches_all_ranks_and_leaves_the_error_unchanged(world, kind, bad):
    compressed, spared = KINDS[kind](), KINDS[kind]()
    for step in range(4):
        if step == 2:
            x = bucket_gradient(world.rank, 99)
            if world.rank == world.size - 1:
                x[17] = bad
            world.all_reduce(x, "avg", compression=compressed.bucket("b", SHAPES))
            assert x.isnan().all()
        x, y = bucket_gradient(world.rank, step), bucket_gradient(world.rank, step)
        world.all_reduce(x, "avg", compression=compressed.bucket("b", SHAPES))
        world.all_reduce(y, "avg", compression=spared.bucket("b", SHAPES))
        assert torch.equal(x, y)


@MANY
@every_kind
@pytest.mark.parametrize("named", [True, False])
def test_a_run_continues_bit_for_bit_from_the_saved_state(world, kind, named):
    buffers = [torch.empty(12, 20), torch.empty(12, 20)]

    def step(compressed, number):
        for i, buffer in enumerate(buffers):
            buffer.copy_(gradient(240, world.rank, 10 * number + i).view(12, 20))
            world.all_reduce(buffer, "avg", compression=compressed.bucket(f"bucket {i}") if named else compressed)
        return [buffer.clone() for buffer in buffers]

    whole = KINDS[kind]()
    straight = [step(whole, n) for n in range(6)]
    first = KINDS[kind]()
    halves = [step(first, n) for n in range(3)]
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second = KINDS[kind]()
    second.load_state_dict(saved)
    assert all(torch.equal(second.state_dict()[name], saved[name]) for name in saved)  # before it is used, too
    halves += [step(second, n) for n in range(3, 6)]
    for expected, got in zip(straight, halves, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))

    whole.reset()
    assert whole.state_dict() == {}
    assert all(torch.equal(a, b) for a, b in zip(step(whole, 0), straight[0], strict=True))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("make", [*KINDS.values(), lambda: PowerSGD(1, warm_start=False), lambda: TopK(0.02)])
def test_sgd_on_least_squares_converges(world, make):
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(16, 12, generator=generator)
    inputs = torch.randn(64 * world.size, 16, generator=generator)
    mine = inputs[world.rank * 64 : (world.rank + 1) * 64]
    compressed, weights = make(), torch.zeros(16, 12)
    flat = torch.empty(192)
    for _ in range(400):
        flat.copy_((mine.t() @ (mine @ weights - mine @ truth) / 64).view(-1))
        world.all_reduce(flat, "avg", compression=compressed.bucket("w", [(0, (16, 12))]))
        weights -= 0.05 * flat.view(16, 12)
    assert (weights - truth).norm() < 0.02 * truth.norm()
    assert is_same_on_all_ranks(world, weights)


@MANY
@every_kind
def test_asynchronous_compressed_sums_equal_the_blocking_ones(world, kind):
    blocking, background = KINDS[kind](), KINDS[kind]()
    for step in range(3):
        expected, works, got = [], [], []
        for i in range(4):
            x = gradient(240, world.rank, 10 * step + i).view(12, 20)
            y = x.clone()
            world.all_reduce(x, "avg", compression=blocking.bucket(i))
            expected.append(x)
            works.append(world.all_reduce(y, "avg", async_op=True, compression=background.bucket(i)))
            got.append(y)
        plain = torch.ones(5)
        world.all_reduce(plain)  # a blocking operation in between
        for work in reversed(works):
            work.wait(timeout=30)
        assert plain.eq(world.size).all()
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


class _CountingCommunicator:
    """A communicator that forwards collectives and counts the bytes passed to it."""

    def __init__(self, comm) -> None:
        self.comm, self.size, self.nbytes = comm, comm.size, 0

    def all_reduce(self, x, op="sum", algorithm="auto", *, reproducible=False):
        self.nbytes += x.numel() * x.element_size()
        self.comm.all_reduce(x, op, algorithm, reproducible=reproducible)

    def all_gather(self, out, x):
        self.nbytes += x.numel() * x.element_size()
        self.comm.all_gather(out, x)


@MANY
@pytest.mark.parametrize("kind", ["fp16", "bf16", "topk", "powersgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_bytes_on_wire_equals_the_bytes_passed_to_the_collectives(world, kind, dtype):
    for shapes in (SHAPES, None):
        compressed, counting = KINDS[kind](), _CountingCommunicator(world)
        x = bucket_gradient(world.rank, 0).to(dtype)
        compressed.all_reduce(counting, x, "avg", shapes=shapes)
        assert counting.nbytes == compressed.bytes_on_wire(NUMEL, dtype, shapes)


@MANY
def test_steps_after_the_first_allocate_no_persistent_memory(world):
    for kind in KINDS:
        compressed = KINDS[kind]()
        places = []
        for step in range(3):
            x = bucket_gradient(world.rank, step)
            world.all_reduce(x, compression=compressed.bucket("b", SHAPES))
            tensors = [*compressed._scratch.values(), *compressed.state_dict().values()]
            places.append(sorted(t.data_ptr() for t in tensors))
        assert places[0] == places[1] == places[2]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, c: w.all_reduce(torch.ones(3), "max", compression=c), "cannot do op 'max'; use sum or avg"),
        (lambda w, c: w.all_reduce(torch.ones(3, dtype=torch.int32), compression=c), "floating-point.*not int32"),
        (lambda w, c: w.all_reduce(torch.ones(3, dtype=torch.complex64), compression=c), "not complex64"),
        (lambda w, c: w.all_reduce(torch.ones(4, 4).t(), compression=c), "not contiguous"),
        (lambda w, c: w.all_reduce(torch.ones(3), compression=c, reproducible=True), "leave out reproducible"),
        (lambda w, c: w.all_reduce(torch.ones(3), "max", async_op=True, compression=c), "cannot do op 'max'"),
    ],
)
@every_kind
def test_unsupported_compressed_reductions_are_refused_by_name(world, kind, call, message):
    with pytest.raises(InputError, match=message):
        call(world, KINDS[kind]())


@MANY
def test_a_buffer_of_another_size_under_the_same_key_is_refused(world):
    compressed = TopK(0.1)
    world.all_reduce(torch.ones(30), compression=compressed.bucket("b"))
    with pytest.raises(InputError, match=r"knows the buffer 'b' with 30 elements.*call reset"):
        world.all_reduce(torch.ones(31), compression=compressed.bucket("b"))
    with pytest.raises(InputError, match="already has a buffer named '1'"):
        world.all_reduce(torch.ones(2), compression=compressed.bucket("1"))
        world.all_reduce(torch.ones(2), compression=compressed.bucket(1))
    compressed.load_state_dict({"b/error": torch.zeros(29)})
    with pytest.raises(
        InputError, match=r"b/error was saved as torch.float32 of 29 elements and is needed as torch.float32 of 30"
    ):
        world.all_reduce(torch.ones(30), compression=compressed.bucket("b"))


def test_options_are_checked_by_name():
    assert repr(from_name("powersgd", rank=2)) == repr(PowerSGD(rank=2))
    assert repr(compression.from_name("topk", ratio=0.5, error_feedback=False)) == repr(TopK(0.5, False))
    assert isinstance(from_name("fp16"), FP16) and isinstance(from_name("bf16"), BF16)
    for call, message in (
        (lambda: from_name("zip"), "no compression 'zip'; use one of fp16, bf16, int8, int4, topk, powersgd"),
        (lambda: from_name("fp16", rank=3), "fp16 has no option 'rank'"),
        (lambda: from_name("powersgd", ratio=3), "no option 'ratio'; it has rank, warm_start"),
        (lambda: TopK(0), "ratio 0 must be above 0"),
        (lambda: TopK(1.5), "at most 1"),
        (lambda: PowerSGD(0), "rank 0 must be at least 1"),
        (lambda: PowerSGD(min_compression=-1), "must not be negative"),
        (lambda: FP16().load_state_dict({"b/error": torch.zeros(3)}), "has no state"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_the_plan_covers_a_bucket_once_and_compresses_only_large_matrices():
    for rank in (1, 2, 4):
        for minimum in (0, 1, 2, 5):
            bucket_plan = plan(NUMEL, SHAPES, rank, minimum)
            covered = torch.zeros(NUMEL, dtype=torch.int64)
            for m in bucket_plan.matrices:
                covered[m.offset : m.offset + m.rows * m.columns] += 1
                assert (m.rows + m.columns) * m.rank * minimum <= m.rows * m.columns
            for lo, hi in bucket_plan.rest:
                covered[lo:hi] += 1
            assert covered.eq(1).all()
            # neighbours are merged
            assert all(a[1] < b[0] for a, b in zip(bucket_plan.rest, bucket_plan.rest[1:], strict=False))
    assert [(m.rows, m.columns) for m in plan(NUMEL, SHAPES, 1, 2).matrices] == [(12, 20), (4, 15)]
    for shapes in ([(0, (3, 4)), (8, (2,))], [(0, (30, 30))], [(-1, (2, 2))]):
        with pytest.raises(InputError, match="outside the bucket of 336 elements or overlaps another"):
            plan(NUMEL, shapes, 1, 2)

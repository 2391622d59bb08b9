"""``reduce``: norms over gradients that are spread over ranks, here threads of one process."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradkit
from tests import oracles, tolerances

pytestmark = pytest.mark.filterwarnings("ignore:reduce is deprecated", "ignore:per_tensor is")

NAN, INF = math.nan, math.inf
RANKS = 3


class Ranks:
    """All ranks meet in every reduction, or the barrier breaks: an unequal count is an error."""

    def __init__(self, backend, count=RANKS):
        self.backend = backend
        self.count = count
        self.barrier = threading.Barrier(count, timeout=20)
        self.values = [None] * count
        self.calls = [[] for _ in range(count)]

    def reduce_of(self, rank, keep_nan):
        """What a communicator gives this rank; a "max" may drop NaN, as MPI's may."""

        def reduce(value, op):
            self.calls[rank].append((op, value.shape, str(value.dtype)))
            on_host = type(value) is np.ndarray  # on every backend, where a rank holds nothing
            self.values[rank] = value.copy() if on_host else self.backend.asnumpy(value)
            self.barrier.wait()
            stacked = np.stack(self.values)
            self.barrier.wait()
            largest = np.max if keep_nan else np.fmax.reduce
            answer = (np.sum if op == "sum" else largest)(stacked, axis=0)
            return answer if on_host or not answer.ndim else self.backend.asarray(answer)

        return reduce

    def run(self, work, *, keep_nan=True):
        """``work(rank, reduce)`` on every rank at once."""

        def attempt(rank):
            try:
                return work(rank, self.reduce_of(rank, keep_nan))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            jobs = [pool.submit(attempt, rank) for rank in range(self.count)]
            errors = [job.exception() for job in jobs]
        broken = threading.BrokenBarrierError  # what the others see once a rank has failed
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, broken)):
            raise error
        return [job.result() for job in jobs]


def f(*values):
    return np.array(values, float)


CONTENTS = {
    "even": ([f(1, 2), f(3)], [f(-4)], [f(5, 6, 7)]),
    "one holds nothing": ([f(3)], [], [f(4)]),
    "one holds everything": ([], [f(3, 4), f(12)], []),
    "nobody holds anything": ([], [None], []),
    "all zero": ([f(0)], [f(0, -0.0)], []),
    "squares overflow": ([f(3e200)], [f(4e200)], [f(1e-200)]),
    "squares underflow": ([f(3 * 2.0**-1000)], [f(4 * 2.0**-1000)], []),
    "only largest sees it": ([f(1e-300)], [f(1e300)], [f(1.0)]),
    "narrow dtypes": (
        [np.full(9, 3, np.float16)],
        [np.full((2, 2), -2, np.float32)],
        [f(0.5)],
    ),
    "NaN on one": ([f(1)], [f(NAN, 2)], [f(3)]),
    "infinity on one": ([f(1)], [], [f(-INF)]),
    "NaN beside infinity": ([f(INF)], [f(NAN)], []),
    "NaN beside nothing": ([f(NAN)], [], []),
}
ORDERS = [1, 2, INF, 3, 0.5]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keep_nan", [True, False], ids=["max keeps NaN", "max drops NaN"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
def test_norm_over_ranks(backend, contents, order, keep_nan):
    ranks = Ranks(backend)
    held = [[None if g is None else backend.asarray(g) for g in part] for part in contents]

    def work(rank, reduce):
        return float(gradkit.grad_norm(held[rank], order, reduce=reduce))

    found = ranks.run(work, keep_nan=keep_nan)
    expected = oracles.norm([g for part in contents for g in part if g is not None], order)
    for got in found:
        assert oracles.off_by(got, expected) <= tolerances.over_ranks(order)
    assert len(set(map(repr, found))) == 1  # every rank has the same bits
    for calls in ranks.calls:
        assert calls == [("max", (), "float64"), ("sum", (), "float64")]


@pytest.mark.parametrize("order", ORDERS)
def test_each_tensor_over_ranks(backend, order):
    """The tensors are shards: each norm is of one tensor's shards on all ranks."""
    shards = [[f(3), f(1, 2)], [f(-4), f(NAN)], [f(0), f(7)]]
    ranks = Ranks(backend)
    held = [[backend.asarray(g) for g in part] for part in shards]

    def work(rank, reduce):
        return backend.asnumpy(gradkit.grad_norm(held[rank], order, per_tensor=True, reduce=reduce))

    for found in ranks.run(work):
        expected = oracles.norm([part[0] for part in shards], order)
        assert oracles.off_by(found[0], expected) <= tolerances.over_ranks(order)
        assert math.isnan(found[1])
    assert ranks.calls[0] == [("max", (2,), "float64"), ("sum", (2,), "float64")]


@pytest.mark.parametrize("clip", ["in place", "functional"])
def test_clipping_over_ranks(backend, clip):
    contents = [[f(3, 0)], [], [f(4)]]
    held = [[backend.asarray(g) for g in part] for part in contents]

    def work(rank, reduce):
        if clip == "in place":
            norm = gradkit.clip_grad_norm(held[rank], 2.5, reduce=reduce)
            return float(norm), held[rank]
        clipped, norm = gradkit.clip_by_global_norm(held[rank], 2.5, reduce=reduce)
        return float(norm), clipped

    for (norm, clipped), part in zip(Ranks(backend).run(work), contents, strict=True):
        assert norm == 5.0
        for got, before in zip(clipped, part, strict=True):
            np.testing.assert_array_equal(backend.asnumpy(got), before * 0.5)


@pytest.mark.guarantee("NaN stays NaN")
def test_every_rank_raises_and_names_its_own(backend):
    held = [[backend.asarray(g)] for g in (f(1), f(NAN), f(3))]
    before = [backend.memory(part[0]) for part in held]

    def work(rank, reduce):
        with pytest.raises(gradkit.NonFiniteNormError) as caught:
            gradkit.clip_grad_norm(held[rank], 1.0, nonfinite="raise", reduce=reduce)
        return caught.value.names

    assert Ranks(backend).run(work) == [(), ("grads[0]",), ()]
    assert [backend.memory(part[0]) for part in held] == before


def test_every_rank_becomes_zero(backend):
    held = [[backend.asarray(g)] for g in (f(1), f(INF), f(3))]

    def work(rank, reduce):
        gradkit.clip_grad_norm(held[rank], 1.0, nonfinite="zero", reduce=reduce)

    Ranks(backend).run(work)
    assert not any(any(backend.memory(part[0])) for part in held)


@pytest.mark.parametrize("order", ORDERS)
def test_one_rank_is_no_reduction(backend, order):
    grads = [backend.asarray(f(1, -2)), backend.asarray(f(3))]
    alone = float(gradkit.grad_norm(grads, order))
    for reduce in (lambda value, _: value, lambda value, _: float(value)):
        found = float(gradkit.grad_norm(grads, order, reduce=reduce))
        assert found == pytest.approx(alone, rel=tolerances.over_ranks(order), abs=0)


@pytest.mark.parametrize("answer", [None, "1", 1j, [1.0], True], ids=repr)
def test_what_reduce_returns_must_be_a_number(backend, answer):
    grads, out = backend.asarray(f(3.0, 4.0)), backend.asarray(np.array(7.0))
    before = backend.memory(grads), backend.memory(out)
    with pytest.raises(TypeError, match="what reduce returned must be a real number"):
        gradkit.clip_grad_norm(grads, 1.0, reduce=lambda *_: answer, out=out)
    with pytest.raises(ValueError, match=r"what reduce returned has shape \(2,\); expected \(\)"):
        gradkit.clip_grad_norm(grads, 1.0, reduce=lambda *_: grads, out=out)
    with pytest.raises(ZeroDivisionError):
        gradkit.clip_grad_norm(grads, 1.0, reduce=lambda *_: 1 / 0, out=out)
    assert (backend.memory(grads), backend.memory(out)) == before

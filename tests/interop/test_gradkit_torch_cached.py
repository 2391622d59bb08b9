"""Norms of ``gradkit.torch`` on tensors like those of an earlier call, which take no record."""

import pytest

import gradkit
from gradkit import _host as host
from gradkit._calls import engines

from .libraries import framework
from .torch_norms import CASES, CB, CW, IMAGES, B, R, W, X, of_tensors, plain, random

torch = framework("torch")
ours = framework("gradkit.torch")
cached = framework("gradkit.torch._cached_calls")
records = framework("gradkit.torch._records")
forward_ad = framework("torch.autograd.forward_ad")
python_dispatch = framework("torch.utils._python_dispatch")

pytestmark = pytest.mark.skipif(host.code is None, reason="nothing is compiled")


def moving_batch_norm(x, weight, bias):
    running = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    y = ours.batch_norm(x, *running, weight, bias, True)
    assert [each._version for each in running] == [1, 1]
    return y, *running


X, R, W, B, *IMAGES = (t.detach().float().requires_grad_() for t in (X, R, W, B, IMAGES, CW, CB))
ROW, SHAPE = X.shape[-1:], X.shape
# But for scales that are looked at, and statistics of several samples.
CACHED = [name for name in CASES if not name.startswith(("invertible", "instance"))]
CACHED = {name: of_tensors(name, torch.float32) for name in CACHED}
CACHED["batch_norm, moving"] = moving_batch_norm, IMAGES


def both_passes(norm, given):
    """Results and gradients; of two results both count, as the sum of a residual norm does."""
    results = norm(*given)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(each.pow(3).sum() for each in results)
    return *(each.detach() for each in results), *torch.autograd.grad(loss, given)


@pytest.mark.parametrize("name", CACHED)
def test_the_third_call_takes_no_record_and_has_the_bits_of_the_first(monkeypatch, name):
    norm, given = CACHED[name]
    first = both_passes(norm, given)
    with monkeypatch.context() as patched:
        patched.setattr(records, "run", None)
        again = both_passes(norm, given)
    assert all(map(torch.equal, again, first))
    others = [each.detach().mul(2).requires_grad_() for each in given]
    expected = both_passes(norm, [each.double().detach().requires_grad_() for each in others])
    for got, wanted in zip(both_passes(norm, others), expected, strict=True):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4)


def test_arguments_that_are_one_tensor_need_not_be_one_again():
    def gated(x, gate):
        return ours.gated_rms_norm(x, gate, ROW)

    for gate in (X, X, R, R):
        wide = [each.detach().double() for each in (X, gate)]
        torch.testing.assert_close(gated(X, gate).double(), gated(*wide), rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch):
    """The records of a layer norm's calls that are like two earlier ones."""
    for _ in range(2):
        both_passes(*CACHED["layer_norm"])
    made, run = [], records.run
    monkeypatch.setattr(records, "run", lambda call: made.append(type(call).__name__) or run(call))
    return made


def norm(x=X, **how):
    return ours.layer_norm(x, ROW, W, B, **how)


def test_other_numbers_are_other_calls(calls):
    for eps in (1.0, 2.0):
        expected = torch.nn.functional.layer_norm(X, ROW, W, B, eps)
        for _ in range(2):
            torch.testing.assert_close(norm(eps=eps), expected)
        assert norm(eps=eps).shape == SHAPE
    assert len(calls) == 4  # each is made, and noted down
    for wrong, error in ((True, TypeError), ([1.0], TypeError), (-1.0, ValueError)):
        with pytest.raises(error, match="eps"):
            norm(eps=wrong)


def test_a_number_that_may_change_is_read_anew(calls):
    eps = torch.tensor(1.0)
    for value in (1.0, 2.0):
        expected = torch.nn.functional.layer_norm(X, ROW, W, B, value)
        torch.testing.assert_close(norm(eps=eps.fill_(value).numpy()), expected)
    assert calls


def test_other_layouts_and_dtypes_are_other_calls(calls):
    wide = plain(*SHAPE[:2], 12)
    for x in (
        wide[..., ::2],
        wide[..., :6],
        wide[:2, :, :6].contiguous(),
        wide[:3, :, :6].double(),
    ):
        w, b = (each.to(x.dtype) for each in (W, B))
        expected = torch.nn.functional.layer_norm(x, ROW, w, b)
        for _ in range(2):
            torch.testing.assert_close(ours.layer_norm(x, ROW, w, b), expected)
    assert len(calls) == 8


def test_numpy_computes_for_those_who_ask(calls):
    with gradkit.use_cpu_backend("numpy"):
        torch.testing.assert_close(norm(), torch.nn.functional.layer_norm(X, ROW, W, B))
    assert calls == ["LayerNorm"]


@pytest.mark.parametrize("name", CACHED)
def test_cached_calls_of_batch_norms_say_what_ran(name):
    """Others leave the engine of the last batch norm as it was."""
    for _ in range(3):
        engines.ran(None)
        both_passes(*CACHED[name])
        assert gradkit.last_engine() == ("native" if "batch" in name else None)
    engines.ran("cudnn")
    layout = random(3, *SHAPE[1:])
    ours.rms_norm(layout, ROW), ours.rms_norm(layout, ROW)
    assert gradkit.last_engine() == "cudnn"


@pytest.mark.usefixtures("calls")
def test_running_statistics_that_are_one_are_refused_again():
    both_passes(*CACHED["batch_norm, moving"])
    (x, *parameters), one = IMAGES, torch.ones(4)
    for _ in range(3):
        with pytest.raises(ValueError, match="share memory"):
            ours.batch_norm(x, one, one, *parameters, True)
    assert torch.equal(one, torch.ones(4))


def test_a_weight_that_cannot_be_inverted_is_refused_again():
    def passes(w):
        return both_passes(lambda x, w: ours.invertible_rms_norm(x, ROW, w), (X, w))

    first, again = passes(W), passes(W)
    assert all(map(torch.equal, first, again))
    zero = (W.detach() * 0).requires_grad_()
    for _ in range(2):
        with pytest.raises(ValueError, match="zero"):
            passes(zero)


@pytest.mark.usefixtures("calls")
def test_others_take_part_in_cached_calls():
    seen = []

    class Mode(python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    y = norm()
    with Mode():
        expected = norm()
        torch.autograd.grad(y.sum(), X)
    assert torch.equal(expected, y)
    assert torch.ops.gradkit.layer_norm.default in seen
    assert torch.ops.gradkit.layer_norm_grad.default in seen
    negated = torch._neg_view(X.detach())
    torch.testing.assert_close(norm(negated), norm(-X.detach()))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        norm(forward_ad.make_dual(X.detach(), X.detach()))
    gradient = torch.func.grad(lambda x: norm(x).pow(3).sum())(X.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(norm().pow(3).sum(), X)[0])


@pytest.mark.usefixtures("calls")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracers_see_cached_calls():
    x, w, b = (each.detach() for each in (X, W, B))
    traced = torch.jit.trace(lambda x: ours.layer_norm(x, ROW, w, b), (x,))
    torch.testing.assert_close(traced(x.exp()), norm(x.exp()))


@pytest.mark.usefixtures("calls")
def test_gradients_that_are_recorded_are_refused_again():
    for _ in range(2):
        (dx,) = torch.autograd.grad(norm().pow(3).sum(), X, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            dx.sum().backward()


def test_what_cannot_be_noted_is_tried_once():
    runs = []

    def run(x):
        runs.append(x)
        return (x + 1,)

    calls = cached.CachedCalls(run, (0,), (), 0)
    x = torch.ones(3)
    for times in (2, 3, 4):  # the first is made, and noted down
        assert torch.equal(calls(x)[0], x + 1)
        assert len(runs) == times
        assert calls.find((x,)) is None


def test_calls_are_forgotten_before_they_are_too_many(monkeypatch):
    monkeypatch.setattr(cached, "_MOST", 3)
    forward = cached.CachedCalls(lambda x, w: (x + w,), (0, 1), (), 0)
    for count in range(1, 9):
        forward(torch.ones(count), torch.ones(count))
        assert 1 <= len(forward._cached) <= 3

"""Batch norm over ranks on tensors of every framework, and beside torch's of the whole batch."""

from itertools import pairwise

import numpy as np
import pytest

import gradkit
from tests.interop.libraries import framework
from tests.ranks import Pair, results

CUTS = (0, 3, 3, 10)  # where the ranks' parts begin and end: one is empty


def hosts(shape=(10, 5, 4)):
    rng = np.random.default_rng(7)
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    scale, bias = rng.standard_normal((2, shape[1])).astype(np.float32)
    return x, dy, scale, bias


def passes_over_ranks(make):
    """Both passes on every rank, on arrays that ``make`` made beforehand."""
    x, dy, scale, bias = hosts()
    held = [
        tuple(map(make, (x[start:end], dy[start:end], scale, bias)))
        for start, end in pairwise(CUTS)
    ]

    def work(group):
        own_x, own_dy, *affine = held[group.rank]
        forward = gradkit.batch_norm(own_x, *affine, group=group)
        backward = gradkit.batch_norm_grad(own_dy, own_x, affine[0], *forward[1:], group=group)
        return *forward, *backward

    return held, results(work, len(held))


def test_results_are_the_callers(lib):
    held, found = passes_over_ranks(lib.make)
    _, expected = passes_over_ranks(np.array)
    for (x, *_), arrays, hosts_ in zip(held, found, expected, strict=True):
        for array, host in zip(arrays, hosts_, strict=True):
            assert isinstance(array, lib.kind)
            assert lib.dtype(array) == "float32"
            assert lib.device(array) == lib.device(x)
            np.testing.assert_array_equal(lib.read(array), host)


def test_ranks_may_be_of_different_frameworks(lib):
    x, *_ = hosts()
    held = lib.make(x[:3]), x[3:]
    (_, mean, inv_std), on_host = results(
        lambda g: gradkit.batch_norm(held[g.rank], group=g), len(held)
    )
    np.testing.assert_array_equal(lib.read(mean), on_host[1])
    np.testing.assert_array_equal(lib.read(inv_std), on_host[2])


@pytest.mark.parametrize("momentum", [0.25, None])
def test_modules_are_those_of_the_whole_batch(torch, momentum):
    """Both passes, running statistics and evaluation; weights' gradients add up over ranks."""
    ours = framework("gradkit.torch")
    x, dy, scale, bias = map(torch.from_numpy, hosts())

    def passes(module, own, given):
        with torch.no_grad():
            module.weight.copy_(scale)
            module.bias.copy_(bias)
        leaf = own.clone().requires_grad_()
        y = module(leaf)
        y.backward(given)
        running = module.running_mean, module.running_var, module.num_batches_tracked
        return y.detach(), leaf.grad, module.weight.grad, module.bias.grad, *running

    def work(group):
        module, part = ours.BatchNorm1d(5, 0.25, momentum, group=group), parts[group.rank]
        found = passes(module, x[part], dy[part])
        return *found, module.eval()(x)

    parts = [slice(*pair) for pair in pairwise(CUTS)]
    whole = torch.nn.BatchNorm1d(5, 0.25, momentum)
    expected = passes(whole, x, dy)
    found = results(work, len(parts))
    for k, join in enumerate((torch.cat, torch.cat, sum, sum)):
        joined = join([each[k] for each in found])
        torch.testing.assert_close(joined, expected[k], rtol=1e-5, atol=1e-5)
    for *_, mean, var, count, inferred in found:
        for got, wanted in zip((mean, var, count), expected[4:], strict=True):
            torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(inferred, whole.eval()(x), rtol=1e-5, atol=1e-5)


def test_without_running_statistics_a_rank_is_evaluated_by_itself(torch):
    """As by PyTorch's: evaluation meets nobody."""
    ours, x = framework("gradkit.torch"), torch.from_numpy(hosts()[0])

    def work(group):
        module = ours.BatchNorm1d(5, track_running_stats=False, group=group).eval()
        return module(x[: 2 + group.rank]).detach()

    alone = torch.nn.BatchNorm1d(5, track_running_stats=False).eval()
    for rank, y in enumerate(results(work, 2)):
        torch.testing.assert_close(y, alone(x[: 2 + rank]).detach(), rtol=1e-5, atol=1e-5)


def test_parameters_that_are_frozen_or_absent(torch):
    ours = framework("gradkit.torch")
    x, dy, scale, bias = map(torch.from_numpy, hosts())

    def work(group):
        given = x[group.rank :: 2].clone().requires_grad_()
        own = bias.clone().requires_grad_()
        for weight in (None, scale):
            y = ours.batch_norm(given, None, None, weight, own, training=True, group=group)
            y.backward(dy[group.rank :: 2])
        return own.grad

    torch.testing.assert_close(sum(results(work, 2)), 2 * dy.sum((0, 2)))
    assert scale.grad is None


def test_errors_have_torchs_names_of_arguments(torch):
    """And are of all ranks, which check the call together."""
    ours = framework("gradkit.torch")
    x = torch.ones(4, 3)
    for options, said in (
        ({"weight": torch.ones(2)}, r"^weight has shape \(2,\); expected \(3,\).* of input$"),
        ({"momentum": 0.5}, "momentum is 0.5, but there are no running statistics"),
        ({"momentum": 2}, "momentum must be from 0 to 1, not 2"),
    ):

        def work(group, options=options, said=said):
            with pytest.raises(ValueError, match=said):
                ours.batch_norm(x, None, None, training=True, group=group, **options)

        results(work, 2)


def test_pytorchs_modules_have_no_group(torch):
    ours = framework("gradkit.torch")
    model = ours.replace_norms(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    model[0].group = Pair()
    with pytest.raises(ValueError, match=r"model\.0 has a group, which PyTorch's norms have not"):
        ours.restore_norms(model)
    model[0].group = None
    assert vars(ours.restore_norms(model)[0]).keys() == vars(torch.nn.BatchNorm1d(2)).keys()

"""PyTorch's own samples of its norms (OpInfo, ModuleInfo), computed by ``gradkit.torch``.

What differs from PyTorch is in ``REFUSED``, with the reason.
"""

import copy
import inspect
from functools import cache

import pytest

from .libraries import framework

torch = framework("torch")
ours = framework("gradkit.torch")
functional = framework("torch.nn.functional")

DTYPES = ("float16", "bfloat16", "float32", "float64")
NAMES = ("layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm")
MODULES = ("LayerNorm", "RMSNorm", "GroupNorm")
MODULES += tuple(f"{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3))


@cache
def function_info(name):
    """Imported when it is needed: that takes seconds."""
    db = framework("torch.testing._internal.common_methods_invocations").op_db
    (info,) = (op for op in db if op.name == f"nn.functional.{name}" and not op.variant_test_name)
    return info


@cache
def module_info(name):
    db = framework("torch.testing._internal.common_modules").module_db
    (info,) = (info for info in db if info.module_cls is getattr(torch.nn, name))
    return info


# (name, whether a sample is meant, what is said, why)
REFUSED = (
    (
        "layer_norm rms_norm batch_norm group_norm instance_norm",
        lambda _, kwargs: (kwargs.get("eps") or 0) < 0,
        "eps must be at least 0",
        "with a negative eps, the square root of a negative number is NaN",
    ),
    (
        "batch_norm",
        lambda x, _: x.ndim < 2,
        r"expected \(N, C, ...\)",
        "PyTorch takes one dimension if it is empty",
    ),
    (
        "batch_norm instance_norm",
        lambda _, kwargs: (
            kwargs.get("running_mean") is not None
            and kwargs.get("training", kwargs.get("use_input_stats", True))
            and not 0 <= kwargs.get("momentum", 0.1) <= 1
        ),
        "momentum must be from 0 to 1",
        "it is the weight of a batch in an average",
    ),
)


def _refusal(name, x, kwargs):
    for names, meant, message, _ in REFUSED:
        if name in names.split() and meant(x, kwargs):
            return message
    return None


def _wide(value):
    """A twin in float64: PyTorch adds up rounded numbers of 16-bit data."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(torch.float64, copy=True).requires_grad_(value.requires_grad)


def _assert_close(got, expected):
    """Samples have up to 640 rows of numbers up to 9, and inv_std is up to 316."""
    rounding = torch.finfo(got.dtype).eps
    sums = torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        got, expected.to(got.dtype), rtol=2 * rounding, atol=2 * rounding * largest + 2e4 * sums
    )


def _by_name(function, sample):
    """A sample's input, and its other arguments by name."""
    (_, *names) = inspect.signature(function).parameters
    return sample.input, dict(zip(names, sample.args, strict=False)) | sample.kwargs


def _wanting(values):
    return [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]


def _assert_gradients_close(y, inputs, expected, twins):
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    own = torch.autograd.grad(y, _wanting(inputs), dy.to(y.dtype))
    wide = dy.to(y.dtype).double()
    theirs = torch.autograd.grad(expected, _wanting(twins), wide, allow_unused=True)
    for got, wanted in zip(own, theirs, strict=True):
        _assert_close(got, torch.zeros_like(got).double() if wanted is None else wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_functions(name, dtype):
    dtype, info = getattr(torch, dtype), function_info(name)
    mine, theirs = getattr(ours, name), getattr(functional, name)
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    done = 0
    for sample in samples:
        x, kwargs = _by_name(theirs, sample)
        if message := _refusal(name, x, kwargs):
            with pytest.raises(ValueError, match=message):
                mine(x, **kwargs)
            continue
        other, twins = _wide(x), {key: _wide(value) for key, value in kwargs.items()}
        expected, got = theirs(other, **twins), mine(x, **kwargs)
        assert got.dtype == dtype
        _assert_close(got, expected)
        inputs = x, *kwargs.values()
        _assert_gradients_close(got, inputs, expected, (other, *twins.values()))
        for key in ("running_mean", "running_var"):
            if kwargs.get(key) is not None:
                _assert_close(kwargs[key], twins[key])
        done += 1
    assert done >= len(samples) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_samples_of_modules(name, training, dtype):
    dtype, info = getattr(torch, dtype), module_info(name)
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    assert len(inputs) >= 4
    for sample in inputs:
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        mine = info.module_cls(*args, **kwargs, dtype=dtype).train(training)
        theirs = copy.deepcopy(mine).double()
        assert type(ours.replace_norms(mine)).__module__ == "gradkit.torch.modules"
        (x,) = sample.forward_input.args
        got, other = mine(x), _wide(x)
        expected = theirs(other)
        _assert_close(got, expected)
        inputs, twins = [x, *mine.parameters()], [other, *theirs.parameters()]
        _assert_gradients_close(got, inputs, expected, twins)
        for statistic, twin in zip(mine.buffers(), theirs.buffers(), strict=True):
            if twin.is_floating_point():
                _assert_close(statistic, twin)
            else:
                assert torch.equal(statistic, twin)


def test_samples_of_errors():
    """Inputs that PyTorch refuses are refused here too, as a ValueError or a TypeError.

    But for groups without elements, which PyTorch 2.14 refuses and older ones took: of nothing,
    gradkit returns nothing.
    """
    found = 0
    for name in NAMES:
        info = function_info(name)
        errors = info.error_inputs("cpu") if info.error_inputs_func else []
        for error in errors:
            sample = error.sample_input
            if name == "group_norm" and not sample.input.numel():
                assert ours.group_norm(sample.input, *sample.args).shape == sample.input.shape
                continue
            with pytest.raises((TypeError, ValueError)):
                getattr(ours, name)(sample.input, *sample.args, **sample.kwargs)
            found += 1
    assert found

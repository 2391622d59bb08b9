"""Other libraries' names for arguments are answered with gradkit's."""

from inspect import isfunction, signature

import numpy as np
import pytest

import gradkit
from gradkit._open.foreign import _INSTEAD

X = np.ones((2, 3))
CALLS = {
    "error_if_nonfinite": lambda v: gradkit.clip_grad_norm([X], 1.0, error_if_nonfinite=v),
    "total_norm": lambda v: gradkit.clip_grads_with_norm([X], max_norm=1.0, total_norm=v),
    "clip_norm": lambda v: gradkit.clip_by_global_norm([X], clip_norm=v),
    "clipnorm": lambda v: gradkit.clip_grad_norm([X], clipnorm=v),
    "global_clipnorm": lambda v: gradkit.clip_grad_norm([X], global_clipnorm=v),
    "clipvalue": lambda v: gradkit.clip_grad_value([X], clipvalue=v),
    "max_delta": lambda v: gradkit.clip_grad_value([X], max_delta=v),
    "threshold": lambda v: gradkit.clip_by_block_norm([X], threshold=v, rms=True),
    "t_list": lambda v: gradkit.clip_by_global_norm(t_list=v, max_norm=1.0),
    "tensors": lambda v: gradkit.grad_norm(tensors=v),
    "updates": lambda v: gradkit.clip_by_adaptive_norm(updates=v, params=[X]),
    "use_norm": lambda v: gradkit.clip_by_global_norm([X], 1.0, use_norm=v),
    "foreach": lambda v: gradkit.clip_grad_value([X], 1.0, foreach=v),
    "parameters": lambda v: gradkit.clip_grad_norm(parameters=v, max_norm=1.0),
    "model_params": lambda v: gradkit.clip_grad_adaptive([X], model_params=v),
    "max_grad_norm": lambda v: gradkit.clip_grad_norm([X], max_grad_norm=v),
    "a_min": lambda v: gradkit.clip_grad_value([X], a_min=v, a_max=1.0),
    "a_max": lambda v: gradkit.clip_grad_value([X], a_max=v, a_min=-1.0),
    "min": lambda v: gradkit.clip_grad_value([X], min=v),
    "max": lambda v: gradkit.clip_grad_value([X], max=v),
    "ord": lambda v: gradkit.grad_norm([X], ord=v),
    "p": lambda v: gradkit.clip_by_global_norm([X], 1.0, p=v),
    "keepdims": lambda v: gradkit.grad_norm([X], keepdims=v),
    "keepdim": lambda v: gradkit.grad_norm([X], keepdim=v),
    "loss_scale": lambda v: gradkit.clip_grad_norm([X], 1.0, loss_scale=v),
    "alpha": lambda v: gradkit.accumulate_grads([X], [X], alpha=v),
    "set_to_none": lambda v: gradkit.zero_grad([X], set_to_none=v),
    "weight": lambda v: gradkit.layer_norm(X, weight=v),
    "gamma": lambda v: gradkit.rms_norm(X, gamma=v),
    "beta": lambda v: gradkit.batch_norm(X, beta=v),
    "offset": lambda v: gradkit.rms_norm(X, X[0], offset=v),
    "variance_epsilon": lambda v: gradkit.batch_norm(X, variance_epsilon=v),
    "reduction_axes": lambda v: gradkit.layer_norm(X, reduction_axes=v),
    "feature_axes": lambda v: gradkit.rms_norm(X, feature_axes=v),
    "groups": lambda v: gradkit.group_norm(X, groups=v),
    "moving_mean": lambda v: gradkit.batch_norm(X, moving_mean=v),
    "moving_variance": lambda v: gradkit.batch_norm(X, moving_variance=v),
    "variance": lambda v: gradkit.batch_norm_inference(X, None, None, X[0], variance=v),
    "use_running_average": lambda v: gradkit.batch_norm(X, use_running_average=v),
    "epsilon": lambda v: gradkit.batch_norm(X, epsilon=v),
    "axis": lambda v: gradkit.batch_norm(X, axis=v),
    "dim": lambda v: gradkit.clip_by_block_norm(X, 1.0, dim=v),
    "data_format": lambda v: gradkit.batch_norm_grad(X, X, None, X[0], X[0], data_format=v),
    "num_channels": lambda v: gradkit.group_norm(X, 1, num_channels=v),
    "input": lambda v: gradkit.layer_norm(input=v),
    "inputs": lambda v: gradkit.rms_norm(inputs=v),
    "elementwise_affine": lambda v: gradkit.layer_norm(X, elementwise_affine=v),
    "affine": lambda v: gradkit.group_norm(X, 1, affine=v),
    "center": lambda v: gradkit.batch_norm(X, center=v),
    "track_running_stats": lambda v: gradkit.batch_norm(X, track_running_stats=v),
    "dout": lambda v: gradkit.rms_norm_grad(x=X, scale=None, inv_std=X[:, 0], dout=v),
    "invstd": lambda v: gradkit.rms_norm_grad(X, X, None, invstd=v),
    "var": lambda v: gradkit.layer_norm_grad(X, X, None, X[:, 0], var=v),
    "running_variance": lambda v: gradkit.batch_norm(X, running_variance=v),
    "normalized_shape": lambda v: gradkit.layer_norm(X, normalized_shape=v),
    "grad_output": lambda v: gradkit.rms_norm_grad(X, X, None, X[:, 0], grad_output=v),
    "grad_out": lambda v: gradkit.layer_norm_grad(X, X, None, X[:, 0], X[:, 0], grad_out=v),
    "rstd": lambda v: gradkit.layer_norm_grad(X, X, None, X[:, 0], rstd=v),
    "save_mean": lambda v: gradkit.batch_norm_grad(X, X, None, inv_std=X[0], save_mean=v),
    "save_invstd": lambda v: gradkit.batch_norm_grad(X, X, None, X[0], save_invstd=v),
    "training": lambda v: gradkit.batch_norm(X, training=v),
}


def test_every_name_is_asked_for():
    assert CALLS.keys() == _INSTEAD.keys()


@pytest.mark.parametrize("name", CALLS)
def test_the_answer_names_ours(name):
    with pytest.raises(TypeError) as caught:
        CALLS[name](1.0)
    told = _INSTEAD[name]
    if not isinstance(told, str):
        told = told["axis" if name == "dim" else "channel_axis"]
    assert f"has no argument {name!r}; {told}" in str(caught.value)
    assert caught.value.__cause__ is None
    advised = told.removeprefix("pass ").partition("=")[0].partition(",")[0]
    if " " not in advised:  # it is the name of one of our arguments
        functions = (getattr(gradkit, n) for n in gradkit.__all__)
        assert any(advised in signature(f).parameters for f in functions if isfunction(f))


def test_the_answer_depends_on_what_the_function_takes():
    with pytest.raises(TypeError, match="has no argument 'axis'; pass channel_axis"):
        gradkit.group_norm(X, 1, axis=-1)
    for name in ("axis", "dim"):
        with pytest.raises(TypeError, match=f"'{name}'; leave it out: a norm is one number"):
            gradkit.grad_norm([X], **{name: 0})


def test_other_errors_are_the_functions_own():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        gradkit.layer_norm(X, colour=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'max_norm'"):
        gradkit.clip_grad_norm([X])
    with pytest.raises(TypeError, match=r"grads is an int; expected an array"):
        gradkit.grad_norm(3)

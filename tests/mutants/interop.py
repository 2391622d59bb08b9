"""Faults in gradkit.torch and gradkit.jax: (file, old text, new text, what, tests that fail).

Planted with ``--interop``, by a Python that has PyTorch, JAX and optax.
"""

_AUTOGRAD = "gradkit/torch/_autograd.py"
_OPERATORS = "gradkit/torch/_operators.py"
_FUNCTIONS = "gradkit/torch/norms.py"
_MODULES = "gradkit/torch/modules.py"
_JAX_CALLS = "gradkit/jax/_callbacks.py"
_JAX_PARTS = "gradkit/jax/_norms.py"
_JAX_ROWS = "gradkit/jax/norms.py"
_JAX_CHANNELS = "gradkit/jax/channel_norms.py"
_JAX_CLIP = "gradkit/jax/clipping.py"
_JAX_ADD = "gradkit/jax/accumulation.py"
_OPTAX = "gradkit/jax/transforms.py"


def _of(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/interop/test_gradkit_{file}.py::test_{name}" for name in names)


ROWS = (
    # PyTorch: autograd
    (
        _AUTOGRAD,
        "gradients = (gradients[0], *gradients)",
        "gradients = (gradients[0], None, *gradients[1:])",
        "no gradient for the residual",
        _of("torch", "gradcheck"),
    ),
    (
        _AUTOGRAD,
        "(arrived[-1], *nothing)",
        "(None, *nothing)",
        "the gradient of the sum alone lost",
        _of("torch", "residual_norms_in_transforms", "gradcheck"),
    ),
    (
        _AUTOGRAD,
        "if is_grad_enabled() or not _are_plain(args[:arriving])",
        "if not _are_plain(args[:arriving])",
        "a second derivative of zero",
        _of("torch", "second_derivatives_are_refused"),
    ),
    (
        _AUTOGRAD,
        "        if is_compiling():  # the backward pass alone\n            return overload(*args)\n",
        "",
        "a backward pass that compilers do not see",
        _of("torch", "backward_passes_that_are_compiled_alone"),
    ),
    (
        _AUTOGRAD,
        "        or _get_tracing_state() is not None\n",
        "",
        "tracers see no operators",
        _of("torch", "traced_programs"),
    ),
    (
        _AUTOGRAD,
        "        or forward_ad._current_level >= 0\n",
        "",
        "tangents dropped",
        _of("torch", "forward_mode_is_refused"),
    ),
    (
        _AUTOGRAD,
        "_dispatch_isTensorSubclassLike(tensor) or ",
        "",
        "modes, and tensors without memory, taken for plain",
        _of("torch", "modes_see_operators", "special_tensors"),
    ),
    (
        _AUTOGRAD,
        " or tensor.is_neg()",
        "",
        "a negative bit ignored",
        _of("torch", "special_tensors"),
    ),
    (
        _AUTOGRAD,
        " or tensor._is_zerotensor()",
        "",
        "zeros without memory refused",
        _of("torch", "special_tensors"),
    ),
    (
        _AUTOGRAD,
        "return first is not None and first.numel() > 0",
        "return first is not None",
        "tensors without elements at once",
        _of("torch", "special_tensors"),
    ),
    (
        _AUTOGRAD,
        "        ctx.mark_non_differentiable(*results[norm.results :])\n",
        "",
        "statistics that seem differentiable",
        _of("torch", "statistics_are_not_differentiable"),
    ),
    (
        _AUTOGRAD,
        "torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides",
        "(torch.Tag.pt2_compliant_tag,)",
        "a compiler that may change layouts",
        _of("torch", "compilers_keep_the_layouts_that_fake_kernels_saw"),
    ),
    (
        _AUTOGRAD,
        "arg if dim is None else arg.select(dim, k)",
        "arg if dim is None else arg.select(0, k)",
        "vmap over the first axis always",
        _of("torch", "transforms", "each_sample_of_a_vmap_is_a_batch"),
    ),
    (
        _AUTOGRAD,
        "else (result if result.numel() else result.new_empty(result.shape))",
        "else result",
        "NumPy's strides of what has no elements",
        _of("torch", "fake_kernels_state_what_comes", "opcheck"),
    ),
    # PyTorch: operators
    (
        _OPERATORS,
        "return (x, scale, *results[1:]), (axis, scale_offset)",
        "return (x, scale, *results[1:]), (axis, 0.0)",
        "layer norm's gradient without scale_offset",
        _of("torch", "gradcheck"),
    ),
    (
        _OPERATORS,
        "return (x, scale, results[1]), (axis, scale_offset)",
        "return (x, scale, results[1]), (axis, 0.0)",
        "RMS norm's gradient without scale_offset",
        _of("torch", "gradcheck"),
    ),
    (
        _OPERATORS,
        "    _, _, scale, _, axis, _, scale_offset = inputs\n    _, s, mean, inv_std = results",
        "    s, _, scale, _, axis, _, scale_offset = inputs\n    _, _, mean, inv_std = results",
        "x kept in the place of the sum",
        _of("torch", "gradcheck"),
    ),
    (
        _OPERATORS,
        "return (s, scale, inv_std), (axis, scale_offset)",
        "return (inputs[0], scale, inv_std), (axis, scale_offset)",
        "x kept in the place of the sum, of an RMS norm",
        _of("torch", "gradcheck"),
    ),
    (
        _OPERATORS,
        "y, _, inv_std = results\n",
        "y, _, inv_std = results\n    y = inputs[0]\n",
        "an invertible norm that keeps its input",
        _of("torch", "the_invertible_norm_keeps_its_output_instead_of_its_input"),
    ),
    (
        _OPERATORS,
        "dy, s, scale, mean, inv_std, axis=axis, ds=ds, scale_offset=scale_offset",
        "dy, s, scale, mean, inv_std, axis=axis, scale_offset=scale_offset",
        "the gradient that arrives at the sum dropped",
        _of("torch", "modules_of_sums"),
    ),
    (
        _OPERATORS,
        "dtype = torch.float64 if x.dtype == torch.float64 else torch.float32",
        "dtype = x.dtype",
        "fake statistics of the data's dtype",
        _of("torch", "fake_kernels_state_what_comes", "opcheck"),
    ),
    (
        _OPERATORS,
        "for axis in inwards[::-1]:",
        "for axis in range(x.ndim)[::-1]:",
        "fake strides of a contiguous tensor",
        _of("torch", "fake_kernels_state_what_comes"),
    ),
    (
        _OPERATORS,
        "else parameter.new_empty(parameter.shape)",
        "else x.new_empty(parameter.shape)",
        "fake gradients of parameters in the data's dtype",
        _of("torch", "fake_kernels_state_what_comes", "opcheck"),
    ),
    (
        _OPERATORS,
        "None if r is None else r.clone()",
        "r",
        "an operator that writes running statistics and returns them",
        _of("torch", "opcheck"),
    ),
    (
        _OPERATORS,
        "                    running.copy_(new)\n",
        "                    pass\n",
        "running statistics of an operator not copied",
        _of("torch", "modes_see_operators"),
    ),
    (
        _OPERATORS,
        "return (x, scale, mean, var), (eps,)",
        "return (x, scale, mean, var), (1e-5,)",
        "the default eps in the gradient by running statistics",
        _of("torch", "gradients_by_running_statistics_have_the_eps_of_the_call"),
    ),
    # PyTorch: functions and modules
    (
        _FUNCTIONS,
        "old.copy_(new.view(samples, channels).mean(0))",
        "old.copy_(new.view(samples, channels)[0])",
        "the first sample's statistics",
        _of("torch", "statistics_of_instance_norms_are_those_of_all_samples"),
    ),
    (
        _FUNCTIONS,
        "torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps",
        "torch.finfo(input.dtype).eps",
        "a 16-bit eps",
        _of("torch", "the_default_eps_is_that_of_the_dtype_of_sums"),
    ),
    (
        _FUNCTIONS,
        "return torch.ones_like(bias)",
        "return None",
        "a bias alone lost",
        _of("torch", "bad_input", "gradcheck") + _of("torch_samples", "samples_of_functions"),
    ),
    (
        _FUNCTIONS,
        "    return -len(wanted)\n",
        "    return -1\n",
        "only the last dimension normalised",
        _of("torch", "gradcheck") + _of("torch_samples", "samples_of_functions"),
    ),
    (
        _FUNCTIONS,
        "old.lerp_(new, momentum.to(old.dtype))",
        "old.copy_(new)",
        "the momentum of an average taken for 1",
        _of("torch", "statistics_that_move_are_torchs"),
    ),
    (
        _MODULES,
        "momentum = 1 / self.num_batches_tracked",
        "momentum = 0.0",
        "no momentum taken for 0",
        _of("torch", "statistics_that_move_are_torchs"),
    ),
    # JAX: calls
    (
        _JAX_CALLS,
        '        raise TypeError(f"gradkit.jax.{refusal}")\n',
        "        made = called(*primals)\n"
        "        return made, [np.zeros(r.shape, r.dtype) for r in results]\n",
        "a second derivative of zero",
        _of("jax", "a_second_derivative_is_refused"),
    ),
    (
        _JAX_CALLS,
        '"broadcast_all" if taken else "expand_dims"',
        '"expand_dims"',
        "results that take the memory of smaller operands",
        _of("jax_lists", "every_example_of_a_vmap_has_its_own_norm"),
    ),
    (
        _JAX_CALLS,
        "floating_point.within(_ENVIRONMENT, run, *arrays)",
        "run(*arrays)",
        "subnormal numbers flushed",
        _of("jax_subnormals", "norms_and_sums_of_subnormal_gradients"),
    ),
    (
        _JAX_CALLS,
        "floating_point.within(_ENVIRONMENT, run, outs, list(ins))",
        "run(outs, list(ins))",
        "subnormal numbers flushed on the way through copies",
        _of("jax_subnormals", "norms_and_sums_of_subnormal_gradients"),
    ),
    (
        _JAX_CALLS,
        "input_output_aliases=taken or None",
        "input_output_aliases=None",
        "results that begin as nothing",
        _of("jax_lists", "bits_of_direct_calls", "sums_of_direct_calls"),
    ),
    (
        _JAX_CALLS,
        "if shared is not None and [a.shape[:depth] for a in ins] == wanted:",
        "if shared is not None:",
        "parameters of the first example for all",
        _of("jax", "vmap_is_a_loop"),
    ),
    (
        _JAX_CALLS,
        "vary(array, axes - result.same_on)",
        "vary(array, axes)",
        "a norm over devices that seems to differ between them",
        _of("jax_devices", "a_norm_over_devices"),
    ),
    # JAX: norms
    (
        _JAX_PARTS,
        "checks.axis_index(axis, ndim, label) - ndim",
        "checks.axis_index(axis, ndim, label)",
        "an axis counted from the front of all examples",
        _of("jax", "vmap_is_a_loop"),
    ),
    (
        _JAX_PARTS,
        "    shared = () if scale is None else None\n",
        "    shared = ()\n",
        "sums over all examples of a vmap",
        _of("jax", "vmap_is_a_loop"),
    ),
    (
        _JAX_ROWS,
        "return (y, s), (s, scale, inv_std)",
        "return (y, s), (x, scale, inv_std)",
        "x kept in the place of the sum",
        _of("jax_norms", "gradients_of_jaxs_own_formula"),
    ),
    (
        _JAX_ROWS,
        "rms_norm_grad(*given, dx, dscale, ds=ds, scale_offset=offset)",
        "rms_norm_grad(*given, dx, dscale, ds=ds)",
        "RMS norm's gradient without scale_offset",
        _of("jax_norms", "gradients_of_jaxs_own_formula"),
    ),
    (
        _JAX_ROWS,
        "    return dx, dx, dscale, dbias\n",
        "    return dx, ds, dscale, dbias\n",
        "the gradient of the residual without that of the norm",
        _of("jax_norms", "gradients_of_jaxs_own_formula"),
    ),
    (
        _JAX_ROWS,
        "return y, (y, scale, bias, inv_std)",
        "return y, (x, scale, bias, inv_std)",
        "an invertible norm that keeps its input",
        _of("jax", "gradients_of_jaxs_own_formula"),
    ),
    (
        _JAX_CHANNELS,
        "(dy, x, scale, mean, var), (dx, dscale, dbias) = ins, three(outs)\n"
        "        given = dy, x, scale, mean, var, channel_axis % x.ndim, eps",
        "(dy, x, scale, mean, var), (dx, dscale, dbias) = ins, three(outs)\n"
        "        given = dy, x, scale, mean, var, channel_axis % x.ndim, 1e-5",
        "the default eps in the gradient by running statistics",
        _of("jax_norms", "gradients_by_running_statistics_have_the_eps_of_the_call"),
    ),
    (
        _JAX_CHANNELS,
        "size * (1 if rows is None else len(rows))",
        "size",
        "one element per channel refused though other devices have more",
        _of("jax_norms", "one_element_per_channel_on_each_device"),
    ),
    (
        _JAX_CHANNELS,
        "number = float(size) if rows is None else count",
        "number = float(size)",
        "a variance unbiased for one device",
        _of("jax_norms", "running_statistics_of_the_whole_batch"),
    ),
    (
        _JAX_CHANNELS,
        "count = float(_size(x, channel_axis) * len(own_row))",
        "count = float(_size(x, channel_axis))",
        "a gradient that divides by one device's count",
        _of("jax_devices", "batch_norm_of_the_whole_batch"),
    ),
    # JAX: lists
    (
        _JAX_CLIP,
        'zero_nonfinite=nonfinite == "zero"',
        "zero_nonfinite=False",
        "what is not finite stays",
        _of("jax_lists", "what_is_not_finite", "bits_of_direct_calls"),
    ),
    (
        _JAX_CLIP,
        "scale=factor, copies=rule.copies",
        "scale=factor, copies=None",
        "copies on other devices counted",
        _of("jax_devices", "a_norm_over_devices"),
    ),
    (
        _JAX_ADD,
        "addends, update, fresh, factor, None",
        "addends, fresh, update, factor, None",
        "flags swapped",
        _of("jax_lists", "sums_of_direct_calls"),
    ),
    (
        _OPTAX,
        "(b / by).astype(g.dtype)",
        "(b / by / every).astype(g.dtype)",
        "a mean that is divided twice",
        _of("jax_lists", "accumulation_takes_the_steps_of_multisteps"),
    ),
    (
        _OPTAX,
        "scale=own, overwrite=first",
        "scale=1.0, overwrite=first",
        "micro-batches that count alike",
        _of("jax_lists", "micro_batches_count_by_their_weight"),
    ),
    (
        _OPTAX,
        "total = jnp.where(first, own, state.weight + own)",
        "total = state.weight + own",
        "the weight of earlier steps",
        _of("jax_lists", "accumulation_takes_the_steps_of_multisteps"),
    ),
    (
        _OPTAX,
        "SpikeGuardState(clipped.state, clipped.norm, clipped.max_norm)",
        "SpikeGuardState(state.statistics, clipped.norm, clipped.max_norm)",
        "a spike guard that learns nothing",
        _of("jax_lists", "spikes_are_clipped_as_by_a_spike_guard"),
    ),
)  # fmt: skip

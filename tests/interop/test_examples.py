"""Every example runs on the CPU, and learns."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from .libraries import framework

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name, *needed):
    for module in needed:
        framework(module)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("torch_training_loop", ("torch",)),
        ("jax_training_step", ("jax",)),
        ("jax_whole_step", ("jax",)),
        ("cupy_training_loop", ()),
        ("thinc_model", ("thinc",)),
        ("tensorflow_norms", ("tensorflow",)),
    ],
)
def test_a_training_loop_learns(name, needed):
    losses = load(name, *needed)(steps=60)
    assert len(losses) == 60
    assert losses[-1] < 0.25 * losses[0]


@pytest.fixture
def kept_programs(jax, tmp_path):
    """While what JAX compiles twice is compiled once."""
    cache = framework("jax.experimental.compilation_cache.compilation_cache")
    for folder in (str(tmp_path / "programs"), None):
        cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", folder)
        if folder:
            yield


@pytest.mark.usefixtures("kept_programs")
def test_the_gpt_in_jax_learns_as_with_jaxs_norms_and_goes_on_from_a_checkpoint(tmp_path):
    """In bfloat16, over two devices; with one layer, which takes less to compile."""
    main = load("jax_gpt", "jax", "optax")
    main.__globals__["LAYERS"] = 1
    ours, theirs = main(["--steps", "8", "--compare"]).values()
    assert theirs.losses == pytest.approx(ours.losses, rel=0.01)
    assert theirs.accuracy == pytest.approx(ours.accuracy, rel=0.05)
    assert ours.losses[-1] < 0.9 * ours.losses[0]
    assert ours.accuracy > 0.15
    kept = ["--checkpoint", str(tmp_path / "gpt.npz")]
    main(["--steps", "3", *kept])
    resumed = main(["--steps", "8", *kept])["gradkit"]
    assert resumed.losses == ours.losses
    assert resumed.accuracy == ours.accuracy


def test_the_gpt_on_plain_arrays_has_pytorchs_loss_and_gradients(torch):
    """At its own size, in float64; PyTorch's are summed in another order."""
    program = runpy.run_path(str(EXAMPLES / "numpy_gpt.py"))
    params = program["initialised"](1, "float64")
    text, following = (part[:2] for part in program["windows"](program["encoded"](), 0))
    loss, grads = program["loss_and_grads"](params, text, following)
    p = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    theirs = program["torch_loss"](p, torch.tensor(text), torch.tensor(following))
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-12)
    for name, grad in grads.items():
        error = np.abs(grad - p[name].grad.numpy()).max()
        assert error < 1e-11 * np.abs(grad).max(), name
    assert program["torch_speed"](1) > 0


def test_the_torch_loop_takes_the_steps_of_pytorchs_own_clipping(torch, monkeypatch):
    """The same losses, but for the 1e-6 that PyTorch adds to the norm."""
    import gradkit

    main = load("torch_training_loop")
    ours = main(steps=20, max_norm=0.1)

    def theirs(grads, max_norm):
        holders = [torch.zeros_like(g).requires_grad_() for g in grads]
        for holder, grad in zip(holders, grads, strict=True):
            holder.grad = grad
        return torch.nn.utils.clip_grad_norm_(holders, max_norm)

    monkeypatch.setattr(gradkit, "clip_grad_norm", theirs)
    assert main(steps=20, max_norm=0.1) == pytest.approx(ours, rel=1e-4)


@pytest.mark.usefixtures("torch")
def test_autograd_functions_pass_gradcheck():
    assert load("torch_autograd_norms")()


def test_autograd_functions_refuse_to_be_differentiated_twice(torch):
    names = runpy.run_path(str(EXAMPLES / "torch_autograd_norms.py"))
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y = names["RMSNorm"].apply(x, torch.ones(3, dtype=torch.float64), 1e-6)
    (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_the_tensorflow_norm_has_tensorflows_gradients(tf):
    """In eager mode and in a graph."""
    norm = runpy.run_path(str(EXAMPLES / "tensorflow_norms.py"))["rms_norm"]
    x, scale = tf.random.normal((4, 6), dtype=tf.float64), tf.linspace(0.5, 2.0, 6)
    scale = tf.cast(scale, tf.float64)

    def by_tf(x, scale):
        return x / tf.sqrt(tf.reduce_mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def gradients(f):
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            loss = tf.reduce_sum(f(x, scale) ** 3)
        return tape.gradient(loss, [x, scale])

    wanted = gradients(by_tf)
    for found in (gradients(norm), tf.function(lambda: gradients(norm))()):
        for got, ref in zip(found, wanted, strict=True):
            assert got.shape == ref.shape
            assert got.numpy() == pytest.approx(ref.numpy(), rel=1e-10, abs=1e-12)


def test_the_thinc_layer_has_the_gradients_of_thincs_own():
    """Under a name of the caller's, from a configuration, and through saved bytes."""
    thinc = framework("thinc.api")
    layer = runpy.run_path(str(EXAMPLES / "thinc_model.py"))["GradkitLayerNorm"]
    thinc.registry.layers("a_name_of_ours.v1", func=layer)
    config = {"model": {"@layers": "a_name_of_ours.v1", "width": 6}}
    rng = np.random.default_rng(0)
    x, dy = rng.normal(1, 2, (2, 5, 6)).astype("f4")
    scale, bias = rng.normal(1, 1, (2, 6)).astype("f4")
    made, own = (thinc.registry.resolve(config)["model"], thinc.LayerNorm(6))
    for model, names in ((made, ("scale", "bias")), (own, ("G", "b"))):
        model.initialize(X=x)
        for name, value in zip(names, (scale, bias), strict=True):
            model.set_param(name, value)
    made = layer(6).from_bytes(made.to_bytes())
    results = []
    for model, names in ((made, ("scale", "bias")), (own, ("G", "b"))):
        y, backprop = model(x, is_train=True)
        results.append([y, backprop(dy.copy()), *(model.get_grad(name) for name in names)])
    for got, ref in zip(*results, strict=True):
        assert got == pytest.approx(ref, rel=1e-4, abs=1e-5)


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        framework(re.search(r"import (\w+)", block)[1])
        names = {}
        exec(block, names)
        grads = names.get("grads") or names["gradkit"].grads_of(names["model"].parameters())
        assert float(names["norm"]) > 1
        assert float(names["gradkit"].grad_norm(grads)) == pytest.approx(1, rel=1e-5)

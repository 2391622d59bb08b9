"""``grad_stats`` on tensors of every framework, on PyTorch's models and inside of ``jit``."""

import numpy as np
import pytest

import gradkit


def _model(torch):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1))
    model[0](torch.tensor([3.0, -4.0])).backward()
    return model


def test_a_module_by_its_names(torch):
    from gradkit.torch import grad_stats

    model = _model(torch)
    for given in (model, model.named_parameters(), list(model.named_parameters())):
        stats = grad_stats(given)
        assert stats.names == ("0.weight",)
        row = {"norm": 5.0, "max": 4.0, "mean": -0.5, "zeros": 0, "nonfinite": 0}
        assert stats.as_dict() == {"0.weight": row}
    assert grad_stats(model.parameters()).names == ("0",)
    assert grad_stats(model[0].weight).names == ("0",)
    model[0].weight.grad.requires_grad_()
    assert not grad_stats(model).table.requires_grad
    nothing = grad_stats(model[1])
    assert (nothing.names, nothing.table.shape, nothing.table.dtype) == ((), (0, 5), torch.float64)
    assert grad_stats([]).table.shape == (0, 5)


def test_what_a_module_is_not(torch):
    from gradkit.torch import grad_stats

    pairs = [("w", torch.nn.Parameter(torch.ones(1)))] * 2
    with pytest.raises(ValueError, match="two parameters named 'w'"):
        grad_stats(pairs)
    for option in ({"plain": "copies"}, {"names": {}}):
        with pytest.raises(ValueError, match="pass group"):
            grad_stats(pairs[:1], **option)
    with pytest.raises(TypeError, match="named_parameters"):
        grad_stats([3])


def test_a_module_over_ranks(torch):
    from gradkit.torch import grad_stats
    from tests.ranks import results

    def run(group):
        model = _model(torch)
        return grad_stats(model, group=group, plain="copies", names=lambda name, _: f"m.{name}")

    for stats in results(run, 2):
        assert stats.names == ("m.0.weight",)
        assert stats["m.0.weight"].norm == 5.0
        assert isinstance(stats.table, torch.Tensor)


def test_inside_of_jit(jax):
    import jax.numpy as jnp

    import gradkit.jax as ours

    grads = {"w": jnp.array([[3.0, -4.0, 0.0]]), "layers": [jnp.ones(3, jnp.bfloat16), None]}

    def step(grads):
        stats = ours.grad_stats(grads)
        return stats, stats["w"].norm + stats.max.sum()

    for run in (jax.jit(step), step):
        stats, total = run(grads)
        assert stats.names == ("layers.0", "w")
        assert float(total) == 10.0
        assert stats.as_dict()["layers.0"] == {
            "norm": pytest.approx(3**0.5), "max": 1.0, "mean": 1.0, "zeros": 0, "nonfinite": 0
        }  # fmt: skip
        row = {"norm": 5.0, "max": 4.0, "mean": pytest.approx(-1 / 3), "zeros": 1, "nonfinite": 0}
        assert stats.as_dict()["w"] == row
    assert jax.jit(ours.grad_stats)(jnp.array([2.0])).names == ("grads",)
    assert jax.jit(ours.grad_stats)([]).table.shape == (0, 5)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, stats)
    assert type(doubled) is gradkit.GradStats
    assert float(doubled["w"].norm) == 10.0


def test_under_vmap_and_not_differentiated(jax):
    import jax.numpy as jnp

    import gradkit.jax as ours

    stats = jax.vmap(ours.grad_stats)({"w": jnp.array([[3.0, 4.0], [0.0, jnp.inf]])})
    np.testing.assert_array_equal(stats.norm, [[5.0], [jnp.inf]])
    np.testing.assert_array_equal(stats["w"].zeros, [0.0, 1.0])
    with pytest.raises(TypeError, match="grad_stats is not differentiable"):
        jax.grad(lambda x: ours.grad_stats(x).norm.sum())(jnp.ones(3))
    with pytest.raises(TypeError, match=r"grads\['i'\]"):
        ours.grad_stats({"i": jnp.ones(3, int)})
    with pytest.raises(ValueError, match=r"grads has two gradients named 'a\.b'"):
        ours.grad_stats({"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}})

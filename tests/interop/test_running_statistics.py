"""Running statistics and batch norm by them, beside PyTorch."""

import pytest

import gradkit


def test_pytorch_too_refuses_one_element_per_channel(torch):
    x, running = torch.ones(1, 3), (torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.functional.batch_norm(x, *running, training=True)
    with pytest.raises(ValueError, match="one element per channel"):
        gradkit.batch_norm(x, running_mean=running[0], running_var=running[1])
    with pytest.raises(ValueError, match="one element per channel"):
        gradkit.batch_norm(x)


def test_a_momentum_is_for_running_statistics(torch):
    """Modules have one without them, as PyTorch's do."""
    import gradkit.torch as ours

    x = torch.arange(24.0).reshape(2, 3, 4)
    for momentum in (0.9, 0.0, torch.tensor(0.1)):
        for call in (
            lambda momentum: ours.batch_norm(x, None, None, training=True, momentum=momentum),
            lambda momentum: ours.instance_norm(x, momentum=momentum),
        ):
            with pytest.raises(ValueError, match="there are no running statistics"):
                call(momentum)
    for name in ("BatchNorm1d", "InstanceNorm1d"):
        for momentum in (0.9, None):
            options = {"momentum": momentum, "track_running_stats": False}
            module, theirs = (getattr(n, name)(3, **options) for n in (ours, torch.nn))
            torch.testing.assert_close(module(x), theirs(x))
    mean = torch.zeros(3)
    ours.batch_norm(x, mean, torch.ones(3), momentum=0.9)  # which does not move in evaluation
    assert mean.tolist() == [0, 0, 0]

"""``gradkit.torch`` on a GPU, where autograd's backward passes run in a thread of its own.

``make test-gpu``. Expected are the results on the CPU, which other files test.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

from .libraries import framework

torch = framework("torch")
ours = framework("gradkit.torch")

from .test_gradkit_torch import ARGUMENTS, _network, _step  # noqa: E402  (skipped without PyTorch)
from .torch_norms import CASES, ONE_OF_EACH, OPERATORS, random  # noqa: E402

pytestmark = pytest.mark.gpu
GPU = "cuda"
IMAGES = random(8, 2, 6, 6, dtype=torch.float32, grad=False)


@pytest.fixture(scope="module", autouse=True)
def _gpu():
    pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")


def there(given):
    """The same on the GPU: leaves that need gradients remain such."""

    def move(tensor):
        return tensor.detach().to(GPU).requires_grad_(tensor.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, move, given)


def both_passes(function, given):
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((k + 1) * each.pow(3).sum() for k, each in enumerate(results))
    leaves = [each for each in given if isinstance(each, torch.Tensor) and each.requires_grad]
    return *(each.detach() for each in results), *torch.autograd.grad(loss, leaves)


def assert_same(got, expected, **bounds):
    for one, other in zip(got, expected, strict=True):
        assert one.device.type == GPU
        torch.testing.assert_close(one.cpu(), other, **bounds)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    function, given = CASES[name]
    expected, on_gpu = both_passes(function, given), there(given)
    for _ in range(3):  # a first call, and two like it
        assert_same(both_passes(function, on_gpu), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name != "frozen_batch_norm"])
def test_other_dtypes(name, dtype):
    """Bounds are some units of the last place of numbers of 1 and of gradients of up to 32."""
    function, given = CASES[name]
    given = [
        each.detach().to(dtype).requires_grad_() if isinstance(each, torch.Tensor) else each
        for each in given
    ]
    step = torch.finfo(dtype).eps
    expected = both_passes(function, given)
    assert_same(both_passes(function, there(given)), expected, rtol=4 * step, atol=64 * step)


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_operators(name, arguments):
    """Values, and shapes, dtypes and strides as on the CPU."""
    operator = getattr(OPERATORS, name)
    with torch.no_grad():
        expected, got = operator(*arguments), operator(*there(arguments))
    expected, got = (each if isinstance(each, tuple) else (each,) for each in (expected, got))
    assert [each.stride() for each in got] == [each.stride() for each in expected]
    for one, other in zip(got, expected, strict=True):
        bounds = {} if other.dtype.itemsize < 8 else {"rtol": 1e-11, "atol": 1e-11}
        assert_same([one], [other], **bounds)


def test_a_network_trains():
    """All norms, beside PyTorch's own, with clipped gradients that are the sums of two batches."""
    target = random(8, 4, 16, dtype=torch.float32, grad=False, seed=1)

    def trained(model, device, clip):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses, norms = [], []
        for _ in range(20):
            optimizer.zero_grad()
            for part in (slice(4), slice(4, None)):
                y = model(IMAGES[part].to(device))
                loss = torch.nn.functional.mse_loss(y, target[part].to(device))
                loss.backward()
                losses.append(loss.detach().cpu())
            norms.append(clip(model.parameters(), 1.0).detach().cpu())
            optimizer.step()
        return torch.stack(losses), torch.stack(norms).double(), model.cpu().state_dict()

    theirs = trained(_network(), "cpu", torch.nn.utils.clip_grad_norm_)
    swapped = ours.replace_norms(_network()).to(GPU)
    mine = trained(swapped, GPU, ours.clip_grad_norm_)
    torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


def test_gradients_in_a_captured_graph():
    """Both passes of a network, and the clip, replayed on other numbers."""
    model = ours.replace_norms(_network()).to(GPU)
    alone = copy.deepcopy(model)
    given, seen = IMAGES.to(GPU), []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step(model, x):
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x).pow(2).mean()
        loss.backward()
        norm = ours.clip_grad_norm_(model.parameters(), 0.25)
        return loss.detach(), norm, *(p.grad for p in model.parameters())

    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(model, given)
    for _ in range(3):
        step(alone, given)
    for step_back in (1, 3):
        given.copy_(IMAGES.to(GPU).roll(step_back, 3))
        graph.replay()
        seen.append([each.clone() for each in results])
        torch.testing.assert_close(seen[-1], list(step(alone, given)))
    assert not torch.equal(seen[0][1], seen[1][1])
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


def test_passes_on_another_stream():
    """The backward pass runs on the stream of its forward pass; nobody waits for another one."""
    x = torch.zeros(1 << 20, device=GPU).view(1024, 1024)
    values = torch.randn(1024, 1024, device=GPU)
    expected = values.clone().requires_grad_()
    weight = torch.ones(1024, device=GPU, requires_grad=True)
    wanted = torch.autograd.grad(
        torch.nn.functional.rms_norm(expected, (1024,), weight, 1e-6).pow(3).sum(),
        (expected, weight),
    )
    ours.rms_norm(values, (1024,), weight).sum().backward()  # compiles
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.copy_(values)
        leaf = x.requires_grad_()
        got = torch.autograd.grad(
            ours.rms_norm(leaf, (1024,), weight, 1e-6).pow(3).sum(), (leaf, weight)
        )
        kept = [each.clone() for each in got]
    side.synchronize()
    torch.testing.assert_close(kept, list(wanted), rtol=1e-4, atol=1e-3)


def test_passes_in_threads():
    """Threads that have made no call of CUDA before, at once."""
    model = ours.replace_norms(_network()).to(GPU).eval()
    expected = [p.clone() for p in _step(copy.deepcopy(model), IMAGES.to(GPU), model)[:1]]

    def work(twin):
        return _step(twin, IMAGES.to(GPU), twin)[:1]

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(work, [copy.deepcopy(model) for _ in range(4)]):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("training", [False, True])
def test_autocast(training):
    model = ours.replace_norms(_network()).to(GPU).train(training)
    alone = copy.deepcopy(model).double()
    with torch.autocast("cuda", torch.bfloat16):
        y = model(IMAGES.to(GPU))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), alone(IMAGES.to(GPU).double()), rtol=0.1, atol=0.15)
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_to_machine_code():
    torch._dynamo.reset()
    x, w = there((random(64, 256, dtype=torch.float32), random(256, dtype=torch.float32)))

    def program(x, w):
        y, s = ours.add_rms_norm(x.sin(), x.cos(), (256,), w)
        return ours.layer_norm(y * s, (256,), w).square().mean()

    expected = torch.autograd.grad(program(x, w), (x, w))
    compiled = torch.compile(program, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), (x, w)), expected)


def test_each_sample_of_a_vmap():
    x, w = there((random(5, 4, 6, grad=False), random(6, grad=False)))
    grads = [
        torch.vmap(
            torch.func.grad(lambda x, w, f=f: f(x, (6,), w).pow(3).sum(), (0, 1)), (0, None)
        )(x, w)
        for f in (ours.layer_norm, torch.nn.functional.layer_norm)
    ]
    torch.testing.assert_close(*grads)


def test_gradients_accumulate():
    """A model's own gradients are the sums of its micro-batches', in float32."""
    model = ours.replace_norms(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)))
    model = model.to(GPU, torch.bfloat16)
    accumulator = ours.GradAccumulator(model)
    batches = random(3, 8, 6, dtype=torch.bfloat16, grad=False).to(GPU)
    expected = {name: 0.0 for name, _ in model.named_parameters()}
    for batch in batches:
        model(batch).pow(2).sum().backward()
        for name, parameter in model.named_parameters():
            expected[name] = expected[name] + parameter.grad.float()
        accumulator.add()
    accumulator.finish()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].to(parameter.grad.dtype))

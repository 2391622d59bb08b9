"""Every function inside ``torch.compile``, which calls it and does not trace it."""

from pathlib import Path

import pytest

import gradkit
from gradkit._open import foreign
from tests.interop.libraries import LIBRARIES, framework
from tests.operations import OPERATIONS, leaves, on

torch = framework("torch")
QUIET = pytest.mark.filterwarnings("ignore")  # PyTorch's own, of breaks in graphs
# The doors are the same, whatever computes behind them: NumPy does for one function of a family.
BY_NUMPY = {each.family: name for name, each in OPERATIONS.items()}.values()


def values(found):
    """All that a call gave, as PyTorch's."""
    for leaf in leaves(found):
        leaf = getattr(leaf, "table", leaf)
        yield leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@QUIET
@pytest.mark.parametrize(
    ("name", "computing"),
    [*((name, "compiled") for name in OPERATIONS), *((name, "numpy") for name in BY_NUMPY)],
)
def test_calls_in_compiled_programs_are_those_outside(name, computing):
    """In the first program that has one, and again with other values."""
    operation, make = OPERATIONS[name], LIBRARIES["torch"]().make
    lists = [(shape, "data") for shape, _ in operation.lists]

    def program(given):
        return operation.function(**given)

    with gradkit.use_cpu_backend(computing):
        for variant in ("", *operation.variants):
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="eager")
            for _ in range(2):
                here, there = (
                    operation.arguments(on(make), variant=variant, lists=lists) for _ in range(2)
                )
                found, expected = list(values(compiled(here))), list(values(program(there)))
                written = zip(values(here), values(there), strict=True)
                for got, ref in [*zip(found, expected, strict=True), *written]:
                    if isinstance(ref, torch.Tensor):
                        assert torch.equal(got.nan_to_num(7.0), ref.nan_to_num(7.0))


def test_nothing_else_is_closed():
    """Not what all context managers and named tuples share."""
    package = Path(gradkit.__file__).parent
    assert all(package in Path(code.co_filename).parents for code in foreign._closed.codes)
    shared = gradkit.clip_grad_norm.__code__, gradkit.step_verdict.__code__
    assert {*shared, gradkit.SpikeGuard.update.__code__} <= foreign._closed.codes


@QUIET
def test_a_whole_graph_says_what_to_do():
    torch._dynamo.reset()
    program = torch.compile(gradkit.per_tensor_norms, backend="eager")
    assert program([torch.full((4,), 2.0)])[0] == 4
    torch._dynamo.reset()
    whole = torch.compile(lambda g: gradkit.grad_norm(g), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"gradkit computes outside of PyTorch's graphs.*fullgraph"):
        whole([torch.ones(3)])


@QUIET
def test_the_order_of_imports_does_not_matter(run_alone):
    """In all other tests it is the other way round."""
    program = """
        import torch, gradkit

        def verdict(norm):
            return gradkit.step_verdict(norm, limit=1.0)

        norm = torch.ones((), dtype=torch.float64)
        print(torch.compile(verdict, backend="eager")(norm).item())
    """
    assert run_alone(program).strip() == "True"

"""The examples of ``gradkit.torch``'s page and docstrings, and the benchmark's code."""

import doctest
import re
from pathlib import Path

import pytest

from .libraries import framework

framework("torch")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "torch.md").read_text()
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MODULES = ("norms", "modules", "clipping", "accumulation", "export")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's exporter
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_of_the_page_runs(number):
    exec(compile(BLOCKS[number], f"docs/torch.md, block {number}", "exec"), {})


def test_the_page_has_code():
    assert len(BLOCKS) == 11


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's exporter
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    found = doctest.testmod(framework(f"gradkit.torch.{name}"))
    assert found.attempted >= 5
    assert found.failed == 0


@pytest.mark.parametrize("name", framework("gradkit.torch").__all__)
def test_every_name_is_on_the_page(name):
    stem = re.sub(r"[123]d$", "", name)
    assert re.search(rf"`(gradkit\.torch\.)?{stem}(1d)?[`(]", PAGE)


def test_every_name_is_documented():
    ours = framework("gradkit.torch")
    assert [name for name in ours.__all__ if not getattr(ours, name).__doc__] == []

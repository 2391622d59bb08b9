"""Tests that are rare: all pairs of parameters are in the others, and the others are few."""

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from tests.pairs import rare


class Item:
    """A slow test with one set of parameters."""

    def __init__(self, params):
        self.nodeid, self.callspec = f"test[{params}]", SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name == "slow"


VALUES = {"text": "abcd", "number": range(4), "function": [lambda k=k: k for k in range(4)]}


@pytest.mark.parametrize("kind", VALUES)
def test_the_tests_that_are_left_have_all_pairs_and_are_few(kind):
    """Values without a text of their own are told apart, and known again, by identity."""
    axes = {"a": VALUES[kind], "b": "xyzw", "c": (True, False, None)}
    items = [Item(dict(zip(axes, each, strict=True))) for each in product(*axes.values())]
    left = [item.callspec.params for item in {*items} - {*rare(items)}]
    for first, second in combinations(axes, 2):
        pairs = {(each[first], each[second]) for each in left}
        assert len(pairs) == len(axes[first]) * len(axes[second])
    assert len(left) < 0.6 * len(items)

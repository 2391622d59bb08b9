"""Rare sets of a test's parameters: others have each two of their values together."""

from collections import defaultdict
from itertools import combinations
from random import Random


def rare(items, marker="slow"):
    """The marked tests without which all pairs of a function's parameters are tested too."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for own in functions.values():
        marked = [item for item in own if item.get_closest_marker(marker)]
        if not marked:
            continue
        seen = set().union(*map(_pairs, {*own} - {*marked}))
        for item in Random(0).sample(marked, len(marked)):  # neighbours have most values in common
            if _pairs(item) <= seen:
                yield item
            seen |= _pairs(item)


def _pairs(item):
    """Each two of a test's parameters: of one parameter itself."""
    spec = getattr(item, "callspec", None)
    named = spec.params.items() if spec else ()
    values = sorted((name, _value(value)) for name, value in named)
    return set(combinations(values, min(2, len(values))))


def _value(value):
    """Identify a value among others: by its text, or as an object if the text does not tell all."""
    text = repr(value)
    vague = " at 0x" in text or "tensor(" in text  # which shows no strides
    return f"object {id(value)}" if vague else text

"""Every property with a thousand examples, for as long as there is time.

``python -m tests.fuzz [--minutes M] [--seed N] [what pytest takes]`` goes round all properties in
an order of its own each time, a hundred examples a visit, so that the time is spread, and says
how far it came. A failure is printed with the command that repeats it.
"""

import argparse
import functools
import os
import random
import sys
import time

import pytest

ROUNDS = 10  # of the hundred examples that the profile has


class Fuzz:
    """A plugin of pytest that runs properties alone, and begins none once time is up."""

    def __init__(self, seconds, seed):
        self.end = time.monotonic() + seconds
        self.seed = seed
        self.properties = self.examples = 0
        self.visited = set()
        self.failures = {}  # the seed that each was found with

    def pytest_collection_modifyitems(self, items):
        """Only what draws examples."""
        items[:] = [item for item in items if hasattr(item.obj, "hypothesis")]
        for handle in {id(item.obj): item.obj.hypothesis for item in items}.values():
            handle.inner_test = self.counted(handle.inner_test)

    def pytest_runtestloop(self, session):
        """Round after round with a seed each."""
        from hypothesis import core  # pytest loads it, and wants to be first

        self.properties = len(session.items)
        for _ in range(ROUNDS):
            core.global_force_seed = self.seed
            for item in random.Random(self.seed).sample(session.items, self.properties):
                if time.monotonic() > self.end:
                    return True
                if item.nodeid not in self.failures:
                    self.visited.add(item.nodeid)
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            self.seed += 1
        return True

    def pytest_runtest_logreport(self, report):
        """Remember what failed."""
        if report.failed:
            self.failures[report.nodeid] = self.seed

    def counted(self, test):
        """The test of one example, counted."""

        @functools.wraps(test)
        def run(*args, **kwargs):
            self.examples += 1
            return test(*args, **kwargs)

        return run


def main():
    """The exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options, rest = parser.parse_known_args()
    os.environ["HYPOTHESIS_PROFILE"] = "fuzz"
    fuzz = Fuzz(60 * options.minutes, options.seed)
    start = time.monotonic()
    status = pytest.main(["-q", "--no-header", *(rest or ["tests"])], plugins=[fuzz])
    print(
        f"fuzz: {len(fuzz.visited)} of {fuzz.properties} properties, {fuzz.examples} examples, "
        f"{len(fuzz.failures)} failed; {time.monotonic() - start:.0f} s, seed {options.seed}"
    )
    for name, seed in fuzz.failures.items():
        print(f"again: HYPOTHESIS_PROFILE=fuzz pytest --hypothesis-seed={seed} '{name}'")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

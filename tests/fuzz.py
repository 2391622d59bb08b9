"""Every property with a thousand examples, for as long as there is time.

``python -m tests.fuzz [--minutes M] [--seed N] [what pytest takes]`` runs the properties in an
order that the seed draws, so that runs which do not come to the end reach different ones, and
says how far it came. A failure is printed with the command that repeats it.
"""

import argparse
import functools
import os
import random
import sys
import time

import pytest


class Fuzz:
    """A plugin of pytest: properties alone, shuffled, and nothing new once time is up."""

    def __init__(self, seconds, seed):
        self.end = time.monotonic() + seconds
        self.seed = seed
        self.properties = self.begun = self.examples = 0
        self.failures = []

    def pytest_collection_modifyitems(self, items):
        """Only what draws examples, in a random order."""
        items[:] = [item for item in items if hasattr(item.obj, "hypothesis")]
        random.Random(self.seed).shuffle(items)
        self.properties = len(items)
        for handle in {id(item.obj): item.obj.hypothesis for item in items}.values():
            handle.inner_test = self.counted(handle.inner_test)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self):
        """Nothing is begun when time is up."""
        if self.is_over():
            return True
        self.begun += 1
        return None

    def pytest_runtest_logreport(self, report):
        """Remember what failed."""
        if report.failed:
            self.failures.append(report.nodeid)

    def is_over(self):
        """Whether time is up."""
        return time.monotonic() > self.end

    def counted(self, test):
        """The test of one example; when time is up those that are left pass unseen."""
        from hypothesis.errors import HypothesisException  # pytest loads it, and wants to be first

        failed = False

        @functools.wraps(test)
        def run(*args, **kwargs):
            nonlocal failed
            if self.is_over() and not failed:  # a failure is made as small as it can be
                return
            self.examples += 1
            try:
                test(*args, **kwargs)
            except HypothesisException:  # this example is none
                raise
            except Exception:
                failed = True
                raise

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
    quiet = ("-q", "--no-header", f"--hypothesis-seed={options.seed}")
    status = pytest.main([*quiet, *(rest or ["tests"])], plugins=[fuzz])
    print(
        f"fuzz: {fuzz.begun} of {fuzz.properties} properties, {fuzz.examples} examples, "
        f"{len(fuzz.failures)} failed; {time.monotonic() - start:.0f} s, seed {options.seed}"
    )
    for name in fuzz.failures:
        repeat = f"HYPOTHESIS_PROFILE=fuzz pytest --hypothesis-seed={options.seed}"
        print(f"again: {repeat} '{name}'")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

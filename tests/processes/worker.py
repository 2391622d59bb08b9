"""One rank: ``python -m tests.processes.worker LIBRARY SIZE SUITE DIRECTORY``."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.processes.places import PLACES
from tests.processes.suites import checks

LIFE_S = 300  # a rank whose launcher is gone ends by itself


def main():
    """Run every check, and write what came of it before any rank begins the next."""
    library, size, suite, directory = sys.argv[1:]
    size, directory = int(size), Path(directory)
    rank = int(os.environ.get("GRADKIT_RANK") or os.environ["PMI_RANK"])
    stack = (directory / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    place = PLACES[library](rank, size, directory)
    with (directory / f"{rank}.jsonl").open("w", buffering=1) as log:
        log.write(json.dumps({"check": "start", "error": "", "same": ""}) + "\n")
        meet(directory, rank, size, 0)
        for number, (name, check) in enumerate(checks(suite, library, size).items()):
            log.write(json.dumps({"check": name, **attempt(check, place)}) + "\n")
            meet(directory, rank, size, number + 1)
    place.close()


def attempt(check, place):
    """Run a check; return its value, which must be the same on all ranks, or its error."""
    start = time.monotonic()
    try:
        same, error = check(place), ""
    except BaseException:
        same, error = "", traceback.format_exc()
    return {"error": error, "same": same, "seconds": time.monotonic() - start}


def meet(directory, rank, size, number):
    """Wait until every rank is here."""
    (directory / f"{number}.{rank}.here").touch()
    while not all((directory / f"{number}.{other}.here").exists() for other in range(size)):
        time.sleep(0.002)


if __name__ == "__main__":
    main()

"""Checks that the ranks of a library run, in their order."""

import os
import time

import numpy as np

from tests.processes import (
    batch_norms,
    cut_models,
    dtensors,
    faults,
    groups,
    norms,
    training,
    trouble,
)
from tests.processes.places import MIXED


def checks(suite, library, size):
    """Each check's name and function, alike on all ranks."""
    return SUITES[suite](library, size)


def everything(library, size):
    """Checks that hold for this library and this number of ranks."""
    found = groups.ALL | norms.CHECKS | batch_norms.CHECKS | training.CHECKS | cut_models.CHECKS
    found |= _OF_ONE.get(library, {})
    if library != "jax":  # whose groups are all processes
        found |= groups.HALVES
    if (library, size) == ("mpi", MIXED):
        found |= {"several frameworks": groups.several_frameworks}
    if size > 1:
        found |= trouble.CHECKS | faults.checks(library)
    return found


_OF_ONE = {
    "torch": {
        "a group without this rank": groups.not_a_member,
        "clipping of DTensors": dtensors.clipping,
        "clipping of partial sums": dtensors.partial_sums,
        "batch norm modules": batch_norms.modules,
        "training with fully_shard": dtensors.sharded_training,
        "training with DDP": dtensors.parallel_training,
        "accumulation under DDP": dtensors.accumulation_under_ddp,
        "accumulation in halves": dtensors.accumulation_in_halves,
        **cut_models.OF_TORCH,
    },
    "jax": {
        "sharded arrays": groups.sharded_arrays,
        "without float64": groups.without_float64,
    },
}


# What the watchdog is for: rank 1 does something else.


def _stays_away(place):
    if place.rank == 1:
        time.sleep(600)
    place.group.allgather(np.zeros(6))


def _dies(place):
    if place.rank == 1:
        os._exit(3)
    place.group.allgather(np.zeros(6))


def _fails(place):
    place.group.allgather(np.zeros(6))
    assert place.rank != 1, "not here"


def _differs(place):
    return str(place.rank)


SUITES = {
    "everything": everything,
    "cut models": lambda library, _size: cut_models.CHECKS | _OF_ONE.get(library, {}),
    "stays away": lambda _library, _size: {**groups.ALL, "stuck": _stays_away},
    "dies": lambda _library, _size: {"dead": _dies},
    "fails": lambda _library, _size: {"fails": _fails, "differs": _differs, **groups.ALL},
}

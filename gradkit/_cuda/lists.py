"""Lists of gradients on a GPU, and the numbers that go with them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from gradkit._calls import lists as records
from gradkit._calls.roles import Numbers
from gradkit._cuda.launch.buffers import contiguous
from gradkit._cuda.launch.device import Device, note_others
from gradkit._cuda.launch.kernels import FLAGS, either, either_flag, kernel
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.list_exact_sums import sums_of_each
from gradkit._cuda.list_norms import PART, norm_steps, order_of, write_parts
from gradkit._cuda.list_statistics import write_stats
from gradkit._cuda.list_sums import add, add_lists, average_steps
from gradkit._cuda.list_tables import Step, launch, plan_of, steps
from gradkit._cuda.list_units import scale_units, write_unit_norms
from gradkit._cuda.list_updates import adamw_steps, sgd_steps
from gradkit._numpy.interrupts import Uninterrupted

_OF_RANKS = "norm_of_ranks"
_CLIP = "clip_by_norm"  # the kernel, and its file: whoever clips does not wait for the others


class Lists(OnDevice):
    """Launches the kernels of lists."""

    def grad_norm(self, call: records.GradNorm) -> None:
        """``norm = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
        launch(norm_steps(self.device, call))

    def norm_parts(self, call: records.NormParts) -> None:
        """``parts[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
        write_parts(self.device, call)

    def grad_stats(self, call: records.ListStats) -> None:
        """A row of ``stats`` for each gradient, or of ``parts`` what it is computed from."""
        write_stats(self.device, call)

    def exact_sums(self, call: records.ExactSums) -> None:
        """Write ``sums``, which are in host memory: this waits for the device."""
        each = sums_of_each(self.device, call)
        call.sums[...] = 0
        np.add.at(call.sums, list(call.rows), self.read(each))

    def rank_state(self, call: records.RankState) -> None:
        """``state = (0, digest, numbers, hi, lo, scale of the sums)``."""
        parts = Numbers(call.state[3:].reshape(1, PART))
        p, copies = call.norm_type, call.copies
        self.norm_parts(
            records.NormParts(grads=call.grads, norm_type=p, parts=parts, copies=copies)
        )
        numbers = np.float64(call.digest), *either(call.scale), *either(call.max_norm)
        self._of_ranks("rank_state", p, *numbers, call.state)

    def join_ranks(self, call: records.JoinRanks) -> None:
        """The norm of all ranks' gradients, unless one failed; and what a clip is to use."""
        expected = np.uint32(len(call.states)), np.float64(call.digest), np.float64(call.norm_type)
        numbers = (*either(call.scale), *either(call.max_norm), FLAGS[call.fresh])
        outs = call.norm, call.found_inf, call.faults, call.factors
        rows = contiguous(self.device, call.states)
        self._of_ranks("join_ranks", call.norm_type, rows, *expected, *numbers, *outs)

    def _of_ranks(self, name: str, norm_type: float, *arguments: Any) -> None:
        """Launch one of norm_of_ranks.cu's kernels of one thread."""
        run = kernel(self.device, _OF_RANKS, name, ORDER=order_of(norm_type))
        run((1,), (1,), arguments)

    def clip_coefficient(self, call: records.ClipCoefficient) -> None:
        """``coefficient = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
        limits, threads = (*either(call.max_norm), np.float64(call.eps)), call.norm.size
        arguments = call.norm, np.int64(threads), *limits
        self.write(("clip_coefficient", "clip_coefficient"), arguments, [call.coefficient], threads)

    def clip_by_norm(self, call: records.ClipByNorm) -> None:
        """``outs = grads * (scale * coefficient)``, or zeros if either is not finite."""
        launch(clip_steps(self.device, call))

    def scale_grads(self, call: records.ScaleGrads) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
        launch(scale_steps(self.device, call))

    def clip_grad_value(self, call: records.ClipGradValue) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
        launch(value_steps(self.device, call))

    def zero_grad(self, call: records.ZeroGrad) -> None:
        """Write +0 over every element, NaN included."""
        launch(zero_steps(self.device, call))

    def unit_norms(self, call: records.UnitNorms) -> None:
        """``norms = (sum |g|^p)^(1/p)`` for each unit, or of the mean of |g|^p."""
        write_unit_norms(self.device, call)

    def clip_units(self, call: records.ClipUnits) -> None:
        """Scale each unit to ``max_norm`` if its norm is larger."""
        scale_units(self.device, call)

    def accumulate_grad(self, call: records.AccumulateGrad) -> None:
        """``buffer += scale * grad`` (broadcast) if ``do_update``; with a scale, in float64."""
        if call.do_update is False or call.scale == 0:
            return
        flag = None if call.do_update is True else call.do_update
        factor = np.float64(1 if call.scale is None else call.scale)
        add(self.device, "accumulate_grad", call, flag, factor)

    def accumulate_grad_v2(self, call: records.AccumulateGradV2) -> None:
        """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
        flag, otherwise = either_flag(call.overwrite)
        if not (otherwise and call.buffer is call.grad):
            add(self.device, "accumulate_grad_v2", call, flag, otherwise)

    def accumulate_grads(self, call: records.AccumulateGrads) -> None:
        """``buffers += scale * grads`` or ``buffers = scale * grads``, and their norm."""
        add_lists(self.device, call)

    def spike_guard_update(self, call: records.SpikeGuardUpdate) -> None:
        """Write the state after a norm, and the limit for it; ``next_state`` may be ``state``."""
        rule = map(np.float64, (call.decay, call.threshold, call.warmup))
        arguments = call.state, call.norm, *rule, FLAGS[call.clips], np.int64(call.norm.size)
        outs, threads = (call.next_state, call.max_norm), call.norm.size
        self.write(("spike_guard", "spike_guard_update"), arguments, outs, threads)

    def step_verdict(self, call: records.StepVerdict) -> None:
        """Write whether the norm is finite and at most the limit, and nothing was found."""
        arguments = call.norm, *either(call.limit), call.found_inf
        self.write(("step_verdict", "step_verdict"), arguments, [call.verdict])

    def keep_if(self, call: records.KeepIf) -> None:
        """``old = new``, byte for byte, if the verdict is true."""
        plan = plan_of(self.device, call.new, call.old)
        launch(steps(self.device, plan.table, "keep_if", "keep_if", *either_flag(call.verdict)))

    def ema_update(self, call: records.EmaUpdate) -> None:
        """Each ``average += (1 - decay) * (param - average)``: a launch for each pair of dtypes."""
        _write([*average_steps(self.device, call)])

    def adamw_update(self, call: records.AdamwUpdate) -> None:
        """If ``verdict``, parameters after a step of AdamW, and its moments."""
        _write([*adamw_steps(self.device, call)])

    def sgd_update(self, call: records.SgdUpdate) -> None:
        """If ``verdict``, parameters after a step of SGD, and their momenta."""
        _write([*sgd_steps(self.device, call)])


def _write(launches: Sequence[Step]) -> None:
    """Launch steps that all write: an interrupt waits until the last is queued."""
    if len(launches) > 1:
        note_others()
    with Uninterrupted() if len(launches) > 1 else nullcontext():
        launch(launches)


def clip_steps(device: Device, call: records.ClipByNorm) -> list[Step]:
    """Launches of ``clip_by_norm``: the one that scales computes the coefficient."""
    numbers = (*either(call.max_norm), np.float64(call.eps), *either(call.scale))
    flags = FLAGS[call.zero_nonfinite], FLAGS[call.outs is call.grads]
    plan = plan_of(device, call.grads, call.outs)
    return steps(device, plan.table, _CLIP, _CLIP, call.norm, *numbers, *flags)


def scale_steps(device: Device, call: records.ScaleGrads) -> list[Step]:
    """Launches of ``scale_grads``."""
    in_place = call.outs is call.grads
    array, number = either(call.coefficient)
    if array is None and number == 1 and in_place:
        return []
    plan = plan_of(device, call.grads, call.outs)
    return steps(device, plan.table, "scale", "scale_grads", array, number, FLAGS[in_place])


def value_steps(device: Device, call: records.ClipGradValue) -> list[Step]:
    """Launches of ``clip_grad_value``."""
    limit, plan = np.float64(call.clip_value), plan_of(device, call.grads, call.outs)
    return steps(device, plan.table, "clip_value", "clip_grad_value", limit)


def zero_steps(device: Device, call: records.ZeroGrad) -> list[Step]:
    """Launches of ``zero_grad``."""
    return steps(device, plan_of(device, call.grads, call.grads).table, "zero", "zero_grad")

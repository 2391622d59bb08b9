"""The norms over channels on a GPU: batch norm, by cuDNN if it can, and group norm."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gradkit._backend import Address, Engine
from gradkit._calls import channels as records
from gradkit._calls.backend import NeedsArrays
from gradkit._calls.roles import Parameter, RunningMean, RunningVar, Statistic
from gradkit._cuda import channel_kernels as kernels
from gradkit._cuda.channel_kernels import Arrays, Exact, Means, Named
from gradkit._cuda.channel_launches import (
    STATISTICS,
    BatchLaunches,
    GroupLaunches,
    batch_launches,
    group_launches,
)
from gradkit._cuda.cudnn import batch_normalization as by_cudnn
from gradkit._cuda.cudnn import library
from gradkit._cuda.cudnn.batch_normalization import Ready
from gradkit._cuda.cudnn.engines import ByCudnn, may_be_cudnns, run_by_cudnn
from gradkit._cuda.held_groups import HeldGradient, HeldNorm, Inputs, NormInputs, NormOuts, Outs
from gradkit._cuda.launch.buffers import copy_back, fill, usable
from gradkit._cuda.launch.device import Device, note_others
from gradkit._cuda.launch.kernels import Launch, kernel, types_of
from gradkit._cuda.launch.operations import OnDevice
from gradkit._dtypes import Types, accumulation_name, float_name
from gradkit.errors import BackendUnavailableError

_Running: TypeAlias = tuple[RunningMean | None, RunningVar | None]
_Held = TypeVar("_Held", HeldNorm, HeldGradient)

_THREADS = 128  # of a block that has one for every channel
_NO_BATCH, _NO_NORM = (None, None), (None, None, None)  # statistics that a call does not want


class ChannelNorms(OnDevice):
    """Launches the kernels of norms over channels, or has cuDNN compute a batch norm."""

    def batch_norm(self, call: records.BatchNorm) -> Engine:
        """Write ``y``, which may be ``x``, ``mean`` and ``inv_std``; move running statistics."""
        moved = getattr(call.running_mean, "dtype", None)
        return self._by(by_cudnn.batch_norm, self._batch_norm, call, call.eps, moved)

    def _batch_norm(self, call: records.BatchNorm) -> None:
        work = self._batch("batch_norm", call, call.mean, call.scale, call.bias)
        view = work.columns.view
        running: _Running = call.running_mean, call.running_var
        outs = view(call.y), call.mean, call.inv_std, *running
        inputs = view(call.x), call.scale, call.bias, *running
        (x, scale, bias, *now), written = work.usable(inputs, outs)
        y, mean, inv_std, *moved = written
        exact: Exact = work.scratch(3)
        of_norm, steps = (exact, mean, inv_std), (*now, *moved)
        numbers = call.eps, call.momentum
        work.finish_moments(work.moments(x), _NO_BATCH, of_norm, steps, running[0], *numbers)
        work.over_columns(kernels.normalize, x, scale, bias, exact, y)
        work.deliver(outs, written)

    def batch_norm_grad(self, call: records.BatchNormGrad) -> Engine:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
        return self._by(by_cudnn.batch_norm_grad, self._batch_norm_grad, call)

    def _batch_norm_grad(self, call: records.BatchNormGrad) -> None:
        work = self._batch("batch_norm_grad", call, call.mean, call.scale, call.dbias)
        view = work.columns.view
        inputs = view(call.dy), view(call.x), call.scale, call.mean, call.inv_std
        outs = view(call.dx), call.dscale, call.dbias
        (dy, x, scale, mean, inv_std), written = work.usable(inputs, outs)
        dx, dscale, dbias = written
        partials = work.partials()
        means: Means = work.scratch(2, work.accumulator)
        work.over_columns(kernels.sum_channels, dy, x, mean, inv_std, partials)
        work.finish(kernels.finish_channels, partials, dscale, dbias, means)
        if call.dx is not None:
            work.over_columns(kernels.apply_channels, dy, x, scale, mean, inv_std, means, dx)
        work.deliver(outs, written)

    def batch_norm_inference(self, call: records.BatchNormInference) -> Engine:
        """Write ``y``, which may be ``x``."""
        return self._by(by_cudnn.batch_norm_inference, self._inference, call, call.eps)

    def _inference(self, call: records.BatchNormInference) -> None:
        work = self._batch("batch_norm_inference", call, call.mean, call.scale, call.bias)
        view = work.columns.view
        inputs, outs = (view(call.x), call.scale, call.bias, call.mean, call.var), (view(call.y),)
        read, written = work.usable(inputs, outs)
        work.over_columns(kernels.infer, *read, *written, last=(np.float64(call.eps),))
        work.deliver(outs, written)

    def batch_norm_inference_grad(self, call: records.BatchNormInferenceGrad) -> None:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``. cuDNN has none."""
        if call.plan.launcher is None and not call.x.shape[call.channel_axis]:
            return
        work = self._batch("batch_norm_inference_grad", call, call.mean, call.scale, call.dbias)
        if call.dx is None:
            work = work.lacking
        view = work.columns.view
        inputs = view(call.dy), view(call.x), call.scale, call.mean, call.var
        outs = view(call.dx), call.dscale, call.dbias
        read, written = work.usable(inputs, outs)
        dx, dscale, dbias = written
        partials = work.partials() if _has_sums(call) else None
        eps = (np.float64(call.eps),)
        work.over_columns(kernels.infer_gradient, *read, dx, partials, last=eps)
        if partials is not None:
            work.finish(kernels.finish_parameters, partials, dscale, dbias, counted=False)
        work.deliver(outs, written)

    def update_running_statistics(self, call: records.UpdateRunningStatistics) -> None:
        """Write the next running statistics, which may be the present ones."""
        device, channels = self.device, call.mean.size
        if not channels:
            return
        given = call.running_mean, call.running_var, call.mean, call.var
        outs = call.next_mean, call.next_var
        read, written = usable(device, given, outs)
        kinds = dict.fromkeys(("STAT_T", "RUN_T"), float_name(call.running_mean.dtype) or "")
        numbers = np.float64(call.count), np.float64(call.momentum)
        arguments = *read, *numbers, *written, np.int64(channels)
        _launch(kernels.update_running, device, STATISTICS, channels, arguments, **kinds)
        for out, result in zip(outs, written, strict=True):
            copy_back(out, result)

    def batch_norm_stats(self, call: records.BatchNormStats) -> None:
        """Write each channel's ``mean`` and biased ``var``, in float64; 0 if it has no elements."""
        if not call.x.shape[call.channel_axis]:
            return
        work = self._batch("batch_norm", call)
        outs = call.mean, call.var
        (data,), written = work.each((work.columns.view(call.x),), outs)
        mean, var = written
        work.finish_moments(work.moments(data), (mean, var), _NO_NORM)
        work.deliver(outs, written)

    def combine_stats(self, call: records.CombineStats) -> None:
        """Write the statistics of all ranks' channels, from the rows ``means[rank]``."""
        device, (ranks, channels) = self.device, call.means.shape
        outs = call.mean, call.var, call.total
        read, written = usable(device, (call.means, call.variances, call.counts), outs)
        arguments = *read, np.uint32(ranks), np.int64(channels), *written
        _launch(kernels.combine_stats, device, "combine_stats", channels, arguments)
        for out, result in zip(outs, written, strict=True):
            copy_back(out, result)

    def batch_norm_apply(self, call: records.BatchNormApply) -> None:
        """Write ``y``, ``saved_mean`` and ``inv_std``; ``y`` may be ``x``."""
        if not call.x.shape[call.channel_axis]:
            return
        work = self._batch("batch_norm", call, call.inv_std, call.scale, call.bias)
        view = work.columns.view
        outs = view(call.y), call.saved_mean, call.inv_std
        inputs = view(call.x), call.scale, call.bias, call.mean, call.var
        (x, scale, bias, mean, var), written = work.each(inputs, outs)
        y, saved_mean, inv_std = written
        exact: Exact = work.scratch(3)
        statistics = mean, var, exact, saved_mean, inv_std
        work.steps.each_channel(kernels.take_stats, *statistics, last=(np.float64(call.eps),))
        work.over_columns(kernels.normalize, x, scale, bias, exact, y)
        work.deliver(outs, written)

    def batch_norm_grad_sums(self, call: records.BatchNormGradSums) -> None:
        """Write each channel's sums of ``dy * xhat`` and of ``dy``, in float64."""
        if not call.x.shape[call.channel_axis]:
            return
        work = self._batch("batch_norm_grad", call, call.mean)
        view = work.columns.view
        outs = call.sum_dy_xhat, call.sum_dy
        inputs, written = work.each((view(call.dy), view(call.x), call.mean, call.inv_std), outs)
        partials = work.partials()
        work.over_columns(kernels.sum_channels, *inputs, partials)
        work.steps.finish(kernels.finish_sums, partials, *written, counted=False)
        work.deliver(outs, written)

    def batch_norm_grad_apply(self, call: records.BatchNormGradApply) -> None:
        """Write ``dx``, from the sums over ``count`` elements a channel; it may be ``dy``."""
        if not call.x.shape[call.channel_axis]:
            return
        work = self._batch("batch_norm_grad", call, call.mean, call.scale)
        view = work.columns.view
        inputs = view(call.dy), view(call.x), call.scale, call.mean, call.inv_std
        sums, outs = (call.sum_dy_xhat, call.sum_dy), (view(call.dx),)
        read, written = work.each((*inputs, *sums), outs)
        dy, x, scale, mean, inv_std, sum_dy_xhat, sum_dy = read
        means: Means = work.scratch(2, work.accumulator)
        count = np.float64(call.count)
        work.steps.each_channel(kernels.take_sums, sum_dy_xhat, sum_dy, count, means)
        work.over_columns(kernels.apply_channels, dy, x, scale, mean, inv_std, means, *written)
        work.deliver(outs, written)

    def group_norm(self, call: records.GroupNorm) -> None:
        """Write ``y``, ``mean`` and ``inv_std``, of (samples, groups); ``y`` may be ``x``."""
        if call.plan.launcher is None and not call.x.size:  # an empty group: mean 0, variance 0
            fill(self.device, call.inv_std, 1 / math.sqrt(call.eps) if call.eps else math.inf)
            fill(self.device, call.mean, 0)
            return
        work = self._groups(HeldNorm, "group_norm", call, call.scale, call.bias)
        view = work.columns.view
        outs: NormOuts = view(call.y), call.mean, call.inv_std
        inputs: NormInputs = view(call.x), call.scale, call.bias
        read, written = work.usable(inputs, outs)
        if isinstance(work, HeldNorm):
            work.write(read, written, call.eps)
        else:
            _write_group_norm(work, read, written, call.eps)
        work.deliver(outs, written)

    def group_norm_grad(self, call: records.GroupNormGrad) -> None:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
        if call.plan.launcher is None and not call.x.size:
            self._clear(call.dscale)
            self._clear(call.dbias)
            return
        work = self._groups(HeldGradient, "group_norm_grad", call, call.scale, call.dbias)
        view = work.columns.view
        outs: Outs = view(call.dx), call.dscale, call.dbias
        inputs: Inputs = view(call.dy), view(call.x), call.scale, call.mean, call.inv_std
        read, written = work.usable(inputs, outs)
        has_dx, has_sums = call.dx is not None, _has_sums(call)
        if isinstance(work, HeldGradient):
            work.write(read, written, has_sums=has_sums)
        else:
            _write_group_gradient(work, read, written, has_dx=has_dx, has_sums=has_sums)
        work.deliver(outs, written)

    def _clear(self, gradient: Parameter | None) -> None:
        if gradient is not None:
            fill(self.device, gradient, 0)

    def _batch(
        self,
        file: str,
        call: Any,
        statistic: Statistic | None = None,
        *parameters: Parameter | None,
    ) -> BatchLaunches:
        """The launches of a call's plan; statistics of their own are of the accumulation dtype."""
        cached: BatchLaunches | Ready | None = call.plan.launcher
        if isinstance(cached, BatchLaunches):
            return cached
        x = call.x
        if statistic is None:
            wide = accumulation_name(float_name(x.dtype) or "")
            types: Types = (float_name(x.dtype) or "", wide, wide)
        else:
            types = types_of(x, statistic, *parameters)
        work = batch_launches(self.device, file, x, call.channel_axis, types)
        if cached is None:  # else cuDNN has computed such a call, and may again
            call.plan.launcher = work
        return work

    def _groups(
        self,
        kind: type[_Held],
        file: str,
        call: records.GroupNorm | records.GroupNormGrad,
        *parameters: Parameter | None,
    ) -> GroupLaunches | _Held:
        """The launches of a call's plan: of ``kind`` if blocks can hold its groups."""
        work: GroupLaunches | _Held | None = call.plan.launcher
        if work is None:
            types, groups = types_of(call.x, call.mean, *parameters), call.mean.shape[1]
            of = call.x, call.channel_axis, groups, types
            work = kind.of(self.device, *of) or group_launches(self.device, file, *of)
            call.plan.launcher = work
        return work

    def _by(
        self, by_cudnn: ByCudnn, natively: Callable[[Any], None], call: Any, *more: Any
    ) -> Engine:
        """Have cuDNN compute a call if it can; ``more``: what else decides that."""
        x, launcher = call.x, call.plan.launcher
        if isinstance(launcher, Ready):
            note_others()
            if launcher.run(self.device, call):
                return "cudnn"
            if type(x) is Address:
                raise NeedsArrays
        if type(x) is Address:  # of a call like one that was native
            natively(call)
            return "native"
        if may_be_cudnns(call):
            note_others()
        if run_by_cudnn(self.device, call, partial(by_cudnn, call=call), more):
            return "cudnn"
        if x.shape[call.channel_axis]:
            natively(call)
        return "native"

    def load_cudnn(self) -> None:
        """Load cuDNN if it is installed, and create this thread's handle."""
        with self.device.active():
            stream = self.device.cuda_stream()
            if stream is None:
                return
            try:
                library.cudnn().handles.get(self.device.number, stream)
            except BackendUnavailableError:
                return


def _write_group_norm(work: GroupLaunches, inputs: NormInputs, outs: NormOuts, eps: float) -> None:
    """Write the norm of groups of any size, of which x is read twice."""
    (x, scale, bias), (y, mean, inv_std) = inputs, outs
    parts, exact = work.parts(), work.scratch(3)
    work.over_columns(kernels.column_moments, x, parts)
    statistics = parts, exact, mean, inv_std
    work.over_groups(kernels.finish_group_moments, *statistics, last=(np.float64(eps),))
    work.over_columns(kernels.normalize_groups, x, scale, bias, exact, y)


def _has_sums(call: records.BatchNormInferenceGrad | records.GroupNormGrad) -> bool:
    """Return whether a gradient of a parameter is wanted."""
    return call.dscale is not None or call.dbias is not None


def _write_group_gradient(
    work: GroupLaunches, inputs: Inputs, outs: Outs, *, has_dx: bool, has_sums: bool
) -> None:
    """Write the gradient of groups of any size, of which dy and x are read twice."""
    (dy, x, scale, mean, inv_std), (dx, dscale, dbias) = inputs, outs
    partials = work.partials()
    work.over_columns(kernels.sum_group_gradient, dy, x, mean, inv_std, partials)
    if has_sums:
        counts = work.shares, *work.extent[:2]
        sums = partials, dscale, dbias
        work.over_channels(kernels.finish_group_parameters, *sums, last=counts)
    if has_dx:
        means: Means = work.scratch(2, work.accumulator)
        work.over_groups(kernels.finish_group_means, partials, scale, means)
        work.over_columns(kernels.apply_group_gradient, dy, x, scale, mean, inv_std, means, dx)


def _launch(
    of: Named[*Arrays],
    device: Device,
    file: str,
    channels: int,
    arguments: tuple[*Arrays],
    **macros: str,
) -> None:
    """Launch a kernel on a thread for every channel, in up to as many blocks as stay at work."""
    blocks = min(max(1, -(-channels // _THREADS)), device.multiprocessors * 8)
    Launch(kernel(device, file, of, **macros), (blocks,), (_THREADS,))(*arguments)

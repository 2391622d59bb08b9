"""The steps of batch norm over ranks, which no public function is: records, run by themselves."""

from gradkit._calls import channels
from gradkit._open.dispatch import run


def _step(kind, **defaults):
    """A function of the record's arguments, in their order."""
    names = [name for name in kind.__annotations__ if name not in kind.result_names]

    def step(*given, out=None, **numbers):
        return run(kind(**{**defaults, **dict(zip(names, given, strict=False)), **numbers}), out)

    return step


batch_norm_stats = _step(channels.BatchNormStats, channel_axis=1)
combine_stats = _step(channels.CombineStats)
batch_norm_apply = _step(channels.BatchNormApply, channel_axis=1, eps=1e-5)
batch_norm_grad_sums = _step(channels.BatchNormGradSums, channel_axis=1)
batch_norm_grad_apply = _step(channels.BatchNormGradApply, channel_axis=1)
update_running_statistics = _step(channels.UpdateRunningStatistics, momentum=0.1)

"""Running statistics of batch norm, by our own kernel."""

from gradkit._backend import Array, Number
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.running import combinations_of_running, update_running
from gradkit._cuda.launch.warmup import asks_for


class RunningStatistics(OnDevice):
    """Launches the kernel that moves them."""

    @asks_for(combinations_of_running)
    def update_running_statistics(
        self,
        running_mean: Array,
        running_var: Array,
        mean: Array,
        var: Array,
        count: Number,
        momentum: float,
        next_mean: Array,
        next_var: Array,
    ) -> None:
        """Write the next running statistics, which may be the present ones."""
        known = running_mean, running_var, mean, var
        update_running(self.device, *known, count, momentum, next_mean, next_var)

"""How many blocks are launched: as many as the device holds of the kernel that was compiled."""

import math

import pytest

from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.grids import column_block
from testbed.emulator import EmulatedDevice

pytestmark = pytest.mark.cuda


class CountingDevice(EmulatedDevice):
    """Holds as many blocks of a kernel as it is told to, and remembers grids."""

    def __init__(self, held):
        super().__init__(multiprocessors=5, max_shared_memory=200_000)
        self.held, self.grids, self.asked = held, {}, {}

    def compile(self, *_):
        return self

    def get_function(self, name):
        def launch(grid, block, *_, shared_mem=0):
            self.grids[name] = grid
            about = self.asked.get(name)
            assert about is None or about == (math.prod(block), shared_mem)

        launch.name = name
        return launch

    def resident(self, kernel, threads, shared_mem):
        self.asked[kernel.name] = threads, shared_mem
        return self.held


@pytest.mark.parametrize("held", [1, 3])
def test_grids_are_as_large_as_what_a_device_holds_of_the_compiled_kernel(held):
    """Blocks of the size and the shared memory that are launched are what it is asked about."""
    device = CountingDevice(held)
    run, whole, ones = CudaBackend(device), 5 * held, device.xp.ones

    def rows(width):
        x, row, column = ones((999, width)), ones(999), ones(width)
        run.layer_norm(x, column, column, 1, 1e-5, x, row, row)
        run.layer_norm_inverse(x, column, column, row, row, 1, x)
        run.layer_norm_grad(x, x, column, row, row, 1, x, column, column)
        return {name: grid[0] for name, grid in device.grids.items()}

    assert rows(2048)["layer_norm"] == whole
    for width in (2048, 6000):
        assert rows(width)["layer_norm_grad"] == whole
    wide = rows(40_000)
    assert wide["row_sums_of_gradient"] == whole
    assert device.grids["apply_gradient"][1] == max(1, whole // 79)
    assert device.grids["layer_norm_inverse"] == (whole, 1)
    device.grids.clear()
    x, channels = ones((64, 3, 640)), ones(3)
    run.batch_norm(x, channels, channels, 1, 1e-5, x, channels, channels, "native")
    run.batch_norm_grad(
        x, x, channels, channels, channels, 1, x, channels, channels, engine="native"
    )
    for name in ("sum_deviations", "normalize", "sum_channels", "apply_channels"):
        assert device.grids[name] == (3, -(-whole // 3))


@pytest.mark.parametrize(
    ("columns", "planes", "across"),
    [(4224, 1, 32), (4193, 1, 32), (4192, 1, 16), (2112, 2, 32), (1024, 2, 8), (1, 1, 8)],
)
def test_few_columns_are_summed_by_more_blocks(columns, planes, across):
    assert column_block(132, columns, planes) == (across, 1024 // across)

"""Use of PyTorch by ``from_torch`` for a group over NCCL, which needs GPUs to be made."""

import inspect
from typing import Any

import numpy as np
import pytest

from gradkit import distributed
from gradkit._ranks.torch import TorchGroup


@pytest.fixture
def alone(torch: Any, tmp_path: Any) -> Any:
    """The module, in a process group of one process, by gloo."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield torch
    torch.distributed.destroy_process_group()


def test_a_group_by_gloo_stays_on_the_host(alone: Any) -> None:
    devices = alone.distributed.get_backend_config(None).split(",")
    assert [pair for pair in devices if pair.startswith("cpu:")] == ["cpu:gloo"]
    for device in (None, "cpu"):
        assert isinstance(distributed.from_torch(device=device), TorchGroup)


def test_a_groups_devices_are_named_with_their_backends(torch: Any) -> None:
    config = torch.distributed.distributed_c10d.BackendConfig
    assert str(config(torch.distributed.Backend("nccl"))) == "cuda:nccl"


def test_rows_are_gathered_from_a_vector(alone: Any) -> None:
    """With the arguments that NCCL's tensors come with."""
    state = alone.from_dlpack(np.arange(6.0))
    rows = alone.empty(6, dtype=alone.float64, device="cpu")
    alone.distributed.all_gather_into_tensor(rows, state, group=None)
    assert rows.view(1, -1).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_streams_take_what_they_are_asked(torch: Any) -> None:
    assert list(inspect.signature(torch.cuda.ExternalStream.__new__).parameters)[:3] == [
        *("cls", "stream_ptr", "device")
    ]
    inspect.signature(torch.cuda.current_stream).bind("cuda:0")
    inspect.signature(torch.cuda.stream).bind(None)

"""Which GPUs a job may use."""

from __future__ import annotations

import pytest

from farandole.errors import UserError
from farandole.launch.gpu.nvidia_smi import Gpu
from farandole.launch.gpu.visible import count_visible, visible_gpus

GPUS = [Gpu(index, f"GPU-{index}abc-1", "H200", "Default", False) for index in range(4)]
MIXED = [*GPUS, Gpu(4, "GPU-4abc-1", "T4", "Default", False)]


@pytest.mark.parametrize(
    ("said", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-3", [3]),
        ("GPU-3ABC,1", [3, 1]),
    ],
)
def test_those_that_cuda_shows(said: str | None, indices: list[int]) -> None:
    environ = {} if said is None else {"CUDA_VISIBLE_DEVICES": said}
    assert [gpu.index for gpu in visible_gpus(GPUS, environ)] == indices


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "'' hides all 4 GPUs"),
        (" ", "hides all 4 GPUs"),
        ("-1", "hides all 4 GPUs"),
        ("0,4", "there is no GPU 4; this host has 4, from 0 to 3"),
        ("0,-1", "'-1' is neither the number"),
        ("0,,1", "'' is neither the number"),
        ("all", "'all' is neither the number"),
        ("1,0,1", "has GPU 1 (H200) twice"),
        ("1,GPU-1abc", "has GPU 1 (H200) twice"),
        ("GPU-9", "GPU-9 is no GPU of this host"),
        ("GPU-", "GPU- is 4 GPUs"),
        ("MIG-1", "not there for parts of a GPU"),
    ],
)
def test_a_list_that_cuda_would_cut_short(said: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": said})
    assert message in str(raised.value)


def test_no_gpu_at_all() -> None:
    with pytest.raises(UserError, match=r"no NVIDIA GPU. Leave --per-gpu out"):
        visible_gpus([], {})


def test_numbers_of_gpus_that_differ_need_an_order() -> None:
    """CUDA counts the fastest first, and `nvidia-smi` by the bus."""
    said = {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(UserError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(MIXED, said)
    (found,) = visible_gpus(MIXED, said | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert found.index == 0
    assert len(visible_gpus(MIXED, {})) == 5, "all of them, in whatever order"


def test_clients_of_another_daemon_have_their_own_count() -> None:
    assert count_visible(GPUS, {}) == 4
    assert count_visible(GPUS, {"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    assert count_visible(MIXED, {"CUDA_VISIBLE_DEVICES": "0"}) == 1, "in the daemon's order"


@pytest.mark.parametrize("said", ["", "-1", ",", "0,0", "0,-1", "0,4"])
def test_a_list_of_such_a_client_that_cuda_would_cut_short(said: str) -> None:
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES='{said}'"):
        count_visible(GPUS, {"CUDA_VISIBLE_DEVICES": said})

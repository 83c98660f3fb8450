"""One GPU for each worker of a host, as far as they go."""

from __future__ import annotations

import pytest
import torch

from farandole.errors import UserError
from farandole.train.start import pick_device
from farandole.worker.environment import RankAssignment


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, and those that were made current."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device(RankAssignment("alone")) == (torch.device("cpu"), 1)


def test_each_worker_has_its_own(chosen: list[torch.device]) -> None:
    # Ranks 2 and 3 of four, on the second of two hosts.
    found = [pick_device(RankAssignment("slurm", 2 + local, 4, local, 2)) for local in (0, 1)]
    assert found == [(torch.device("cuda", 0), 1), (torch.device("cuda", 1), 1)]
    assert chosen == [device for device, _ in found]


def test_more_workers_than_gpus_share_and_are_told_once(chosen: list[torch.device]) -> None:
    with pytest.warns(UserWarning, match=r"3 workers share 2 GPU\(s\)"):
        first = pick_device(RankAssignment("farandole", 0, 3, 0, 3))
    last = pick_device(RankAssignment("farandole", 2, 3, 2, 3))  # a warning would be an error here
    assert first == last == (torch.device("cuda", 0), 2)
    assert chosen == [torch.device("cuda", 0)] * 2


def test_a_torch_that_sees_other_gpus_than_the_launcher(chosen: list[torch.device]) -> None:
    environ = {"FARANDOLE_PER_GPU": "2"}
    with pytest.raises(UserError, match=r"8 workers were .* sees 2 GPU\(s\) here, which makes 4"):
        pick_device(RankAssignment("farandole", 5, 8, 5, 8), environ)
    assert chosen == []


def test_a_torch_that_sees_no_gpus_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environ = {"FARANDOLE_PER_GPU": "2"}
    with pytest.warns(UserWarning, match=r"--per-gpu 2: torch .* finds no GPU"):
        first = pick_device(RankAssignment("farandole", 0, 2, 0, 2), environ)
    last = pick_device(RankAssignment("farandole", 1, 2, 1, 2), environ)  # would be an error here
    assert first == last == (torch.device("cpu"), 1)


def test_so_many_a_gpu_sit_side_by_side(chosen: list[torch.device]) -> None:
    """No warning: whoever asks for it knows."""
    environ = {"FARANDOLE_PER_GPU": "2"}
    found = [pick_device(RankAssignment("farandole", n, 4, n, 4), environ) for n in range(4)]
    assert found == [(torch.device("cuda", n // 2), 2) for n in range(4)]

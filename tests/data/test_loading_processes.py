"""A loading process that is killed: replaced once, with every sample once and in order."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from farandole.comm import Exchange, Group, InProcess
from farandole.data import Loader, LoaderOptions
from farandole.data.process_start import ProcessStart
from farandole.errors import DataError

PATIENCE_SECONDS = 200.0


class Numbered(Dataset[tuple[int, int, int]]):
    """Each sample with the process that has loaded it, and whether that was the main one."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, os.getpid(), 1 if get_worker_info() is None else 0


class Stream(IterableDataset[tuple[int, int, int]]):
    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return (Numbered()[index] for index in range(60))


def loader_of(dataset: Any, **options: Any) -> Loader:
    group = Group(InProcess(Exchange(1, timedelta(seconds=PATIENCE_SECONDS)), 0))
    how = LoaderOptions(batch_size=4, shuffle=None if isinstance(dataset, Stream) else False)
    return Loader(dataset, how, group=group, device=torch.device("cpu"), **options)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.005)


def read_and_kill(loader: Loader) -> list[int]:
    seen: list[int] = []
    for numbers, pids, _ in loader:
        seen += numbers.tolist()
        if len(seen) == 20:
            kill(int(pids[0]))  # nothing happens here
    return seen


@pytest.mark.parametrize("persistent", [False, True])
def test_one_is_replaced_and_the_second_is_an_error(persistent: bool) -> None:
    loader = loader_of(Numbered(), num_workers=2, persistent_workers=persistent)
    handler = signal.getsignal(signal.SIGCHLD)
    with pytest.warns(UserWarning, match=r"process \d of 2 \(pid \d+\) was killed by SIGKILL \(by"):
        seen = read_and_kill(loader)
    assert seen == list(range(60))
    assert signal.getsignal(signal.SIGCHLD) is handler
    batches = iter(loader)  # the next epoch, as if nothing had been
    _, pids, inside = next(batches)
    assert int(inside[0]) == 0
    kill(int(pids[0]))
    with pytest.raises(
        DataError, match=rf"\(pid {int(pids[0])}\) was killed .*rank 0, after anoth"
    ):
        list(batches)


def test_the_process_of_a_stream_is_replaced_too() -> None:
    loader = loader_of(Stream(), num_workers=1)
    with pytest.warns(UserWarning, match="was killed by SIGKILL"):
        seen = read_and_kill(loader)
    assert seen == list(range(60))


class ShuffledStream(Stream):
    """It draws its order where it is read."""

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return (Numbered()[index] for index in random.sample(range(60), 60))


def test_a_new_process_shuffles_a_stream_as_the_lost_one_did() -> None:
    with pytest.warns(UserWarning, match="was killed by SIGKILL"):
        seen = read_and_kill(loader_of(ShuffledStream(), num_workers=1))
    assert sorted(seen) == list(range(60)) != seen


class Broken(Numbered):
    def __getitem__(self, index: int) -> tuple[int, int, int]:
        if index == 17:
            raise RuntimeError("sample 17 is broken")
        return super().__getitem__(index)


def test_an_error_of_a_sample_is_not_taken_for_a_loss() -> None:
    with pytest.raises(RuntimeError, match="sample 17 is broken"):
        list(loader_of(Broken(), num_workers=2))


class Slow(Numbered):
    def __getitem__(self, index: int) -> tuple[int, int, int]:
        time.sleep(0.3 if index == 0 else 0)
        return super().__getitem__(index)


def test_a_slow_sample_changes_no_order() -> None:
    batches = [numbers.tolist() for numbers, _, _ in loader_of(Slow(), num_workers=2)]
    assert batches == [list(range(at, at + 4)) for at in range(0, 60, 4)]


def test_a_process_keeps_its_memory_before_the_script_has_a_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    name = "farandole.data.process_start.keep_freed_memory"
    monkeypatch.setattr(name, lambda: done.append("kept"))
    ProcessStart(done.append)(7)
    assert done == ["kept", 7]

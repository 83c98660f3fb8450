"""Batches on their way to a device; copies beside the computation need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from farandole.data.device import DeviceCopies

COUNT = 12


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def batches() -> list[Any]:
    return [{"pair": Pair(torch.full((1000,), at), f"{at}"), "many": [at]} for at in range(COUNT)]


def test_on_a_cpu_nothing_is_touched() -> None:
    given = iter(batches())
    assert DeviceCopies(torch.device("cpu")).moved(given) is given


def test_other_devices_get_their_copies() -> None:
    moved = list(DeviceCopies(torch.device("meta")).moved(iter(batches())))
    assert [each["pair"].x.device.type for each in moved] == ["meta"] * COUNT
    assert [each["pair"].name for each in moved] == [str(at) for at in range(COUNT)]


class FakeCuda:
    """Streams as lists of what was done, in the order in which the host did it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.where = "current"
        log = self.log

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def record_event(self) -> str:
                log.append(f"event on {self.name}")
                return f"event {len(log)}"

            def wait_event(self, event: str) -> None:
                log.append(f"{self.name} waits")

        class Entered:
            def __init__(self, stream: Stream) -> None:
                self.stream = stream

            def __enter__(inner) -> None:  # noqa: N805
                self.where = inner.stream.name

            def __exit__(inner, *_: object) -> None:  # noqa: N805
                self.where = "current"

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
        monkeypatch.setattr(torch.cuda, "stream", Entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))

    def batch(self, number: int) -> Any:
        """Known by its `record_stream`, as graphs are."""

        def to(device: torch.device) -> Any:
            self.log.append(f"copy {number} on {self.where}")
            return moved

        moved = SimpleNamespace(
            number=number,
            to=to,
            record_stream=lambda stream: self.log.append(f"{number} recorded on {stream.name}"),
        )
        return moved


def test_the_order_of_what_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    copies = DeviceCopies(torch.device("cuda", 0))
    for batch in copies.moved(cuda.batch(number) for number in range(2)):
        cuda.log.append(f"step {batch.number}")
    assert cuda.log == [
        "copy 0 on side",
        "event on side",
        "copy 1 on side",
        "event on side",
        "current waits",
        "0 recorded on current",
        "step 0",
        "current waits",
        "1 recorded on current",
        "step 1",
    ]


def test_what_cannot_be_recorded_is_copied_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    batch = cuda.batch(0)
    del batch.record_stream
    assert list(DeviceCopies(torch.device("cuda", 0)).moved(iter([[batch]]))) == [[batch]]
    assert cuda.log == ["copy 0 on current"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_every_batch_is_whole() -> None:
    device = torch.device("cuda")
    given = [
        {
            "x": torch.full((1 << 20,), float(at)).pin_memory(),
            "packed": pack_sequence([torch.ones(3)]),
        }
        for at in range(COUNT)
    ]
    sums = []
    for batch in DeviceCopies(device).moved(iter(given)):
        assert batch["packed"].data.is_cuda
        weight = torch.randn(2048, 2048, device=device)
        for _ in range(5):  # the step is still under way when the batch is given up
            weight = weight @ weight / 2048
        sums.append(batch["x"].sum() + 0 * weight.sum().nan_to_num())
        del batch
    assert [float(each) for each in sums] == [float(at * (1 << 20)) for at in range(COUNT)]

"""What goes between a device and a table's buffer: on the CPU here, on a GPU in tests/gpu."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.sync.server.staging import Staging, staging_of

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@given(SHAPES, st.data())
def test_there_and_back(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    missing = data.draw(st.sets(st.integers(0, len(tensors) - 1)))
    staging = Staging(tensors)
    count = sum(tensor.numel() for tensor in tensors)
    for absent in ([], missing):  # what was there before must not shine through
        given = [None if at in absent else tensor for at, tensor in enumerate(tensors)]
        into = torch.full((count,), torch.nan)
        staging.take(given, into)
        kept = [torch.zeros_like(t) if at in absent else t for at, t in enumerate(tensors)]
        assert torch.equal(into, torch.cat([tensor.reshape(-1) for tensor in kept]))
        back = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        staging.give(into, back)
        assert all(map(torch.equal, back, kept))


def test_orders_of_memory_and_dtypes_are_as_they_are_elsewhere() -> None:
    odd = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3, 2).t()]
    staging, into = Staging(odd), torch.empty(2 * 3 * 16 + 6)
    staging.take([odd[0].half(), odd[1]], into)
    expected = [odd[0].half().float().reshape(-1), odd[1].reshape(-1)]
    assert torch.equal(into, torch.cat(expected))
    back = [torch.zeros_like(tensor) for tensor in odd]
    staging.give(into, back)
    assert torch.equal(back[0], odd[0].half().float())
    assert torch.equal(back[1], odd[1])
    assert back[0].is_contiguous(memory_format=torch.channels_last)


def test_the_host_needs_none() -> None:
    assert staging_of([torch.zeros(2)]) is None
    assert staging_of([torch.zeros(2), torch.zeros(2, device="meta")]) is None

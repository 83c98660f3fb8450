"""Who owns what and who needs what, against counting it out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.layout.tiles.core.grid import Grid, copies, needed_shape
from farandole.layout.tiles.core.intervals import (
    Cells,
    Interval,
    TransposedWindow,
    Window,
    owned_interval,
    place_in,
    runs,
    total,
)

small = st.integers(0, 4)
windows = st.builds(
    Window, st.integers(1, 5), st.integers(1, 4), small, small, dilation=st.integers(1, 3)
)
transposed_windows = st.builds(
    TransposedWindow, st.integers(1, 5), st.integers(1, 4), small, st.just(0), st.integers(1, 3)
)
sizes = st.integers(1, 20)


def part_of(length: int, data: st.DataObject) -> Interval:
    start = data.draw(st.integers(0, length - 1))
    return Interval(start, data.draw(st.integers(start + 1, length)))


@given(sizes, st.integers(1, 9))
def test_shares_cover_an_axis_once(size: int, parts: int) -> None:
    shares = [owned_interval(index, parts, size) for index in range(parts)]
    owned = [at for each in shares for at in range(each.start, each.stop)]
    assert owned == list(range(size))
    assert max(each.length for each in shares) - min(each.length for each in shares) <= 1


def inputs_of(window: Window, output: int) -> set[int]:
    return {
        output * window.stride - window.before + window.dilation * at for at in range(window.kernel)
    }


@given(windows, sizes, st.data())
def test_a_window_needs_what_its_outputs_look_at(
    window: Window, size: int, data: st.DataObject
) -> None:
    padded = size + window.before + window.after
    length = window.length(size)
    if padded < window.reach:
        assert length < 1
        return
    line = torch.zeros(1, 1, padded)
    kernel = torch.zeros(1, 1, window.kernel)
    made = F.conv1d(line, kernel, stride=window.stride, dilation=window.dilation)
    assert length == made.shape[2]
    output = part_of(length, data)
    looked_at = set().union(*(inputs_of(window, at) for at in range(output.start, output.stop)))
    assert window.needs(output) == Interval(min(looked_at), max(looked_at) + 1)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), sizes, st.data())
def test_a_window_that_hangs_over_the_end(
    kernel: int, stride: int, dilation: int, size: int, data: st.DataObject
) -> None:
    padding = data.draw(st.integers(0, kernel // 2))
    window = Window(kernel, stride, padding, padding, dilation)
    if size + 2 * padding < window.reach:
        return
    made = F.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, dilation, ceil_mode=True)
    assert window.length(size, ceil=True) == made.shape[2]


@given(transposed_windows, sizes, st.data())
def test_a_transposed_window_needs_what_reaches_its_outputs(
    window: TransposedWindow, size: int, data: st.DataObject
) -> None:
    length = window.length(size)
    if length < 1:
        return
    output = part_of(length, data)
    reaching = {
        at
        for at in range(-30, size + 30)
        for tap in range(window.kernel)
        if output.start <= at * window.stride - window.padding + tap * window.dilation < output.stop
    }
    needs = window.needs(output)
    assert reaching <= set(range(needs.start, needs.stop))
    if reaching:
        # The first and the last may reach past the outputs, but never fall short of them.
        first, last = needs.start, needs.stop - 1
        behind = window.dilation * (window.kernel - 1)
        assert window.begins(first) + behind >= output.start
        assert window.begins(last) < output.stop


@given(sizes, sizes, st.data())
def test_cells_are_those_of_torch(size: int, outputs: int, data: st.DataObject) -> None:
    cells = Cells(size, outputs)
    line = torch.eye(size).reshape(size, 1, size)
    counted = F.adaptive_avg_pool1d(line, outputs)[:, 0] > 0  # by input and output
    output = part_of(outputs, data)
    needed = counted[:, output.slice].any(1).nonzero().flatten().tolist()
    assert cells.needs(output) == Interval(needed[0], needed[-1] + 1)


@given(st.sets(st.integers(-5, 60)))
def test_runs_have_every_position_in_its_place(positions: set[int]) -> None:
    found = runs(positions)
    line = [at for run in found for at in range(run.start, run.stop)]
    assert len(line) == total(found)
    assert positions <= set(line)
    assert line == sorted(set(line))
    for at in positions:
        assert line[place_in(found, at)] == at


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(sizes, sizes, sizes),
    st.sampled_from([(0, 1, 2), (None, 1, 2), (0, None, None), (1, 0, 2)]),
    st.data(),
)
def test_every_position_that_is_needed_comes_from_one_owner(
    parts: tuple[int, int, int],
    lengths: tuple[int, int, int],
    axes: tuple[int | None, ...],
    data: st.DataObject,
) -> None:
    grid = Grid(parts[1:], parts[0])
    needs = [
        tuple(
            (Interval(start, start + data.draw(st.integers(0, 6))),)
            for start in (data.draw(st.integers(-2, size)) for size in lengths)
        )
        for _ in range(grid.shards)
    ]
    image = torch.arange(1, 1 + lengths[0] * lengths[1] * lengths[2]).reshape(lengths)
    found = [torch.zeros(needed_shape(each), dtype=torch.long) for each in needs]
    for copy in copies(grid, lengths, axes, needs):
        owned = image[tuple(each.slice for each in grid.owned(copy.source, lengths, axes))]
        target = found[copy.to][tuple(each.slice for each in copy.put)]
        assert not target.any()
        target += owned[tuple(each.slice for each in copy.taken)]
    for box, result in zip(needs, found, strict=True):
        inside = [run.meets(Interval(0, size)) for (run,), size in zip(box, lengths, strict=True)]
        expected = torch.zeros_like(result)
        at = [each.moved(-run.start).slice for each, (run,) in zip(inside, box, strict=True)]
        expected[tuple(at)] = image[tuple(each.slice for each in inside)]
        assert torch.equal(result, expected)

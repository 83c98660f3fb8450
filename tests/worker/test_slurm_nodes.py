"""Slurm's short forms of lists of nodes and of counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.worker.slurm_nodes import expand_nodes, tasks_per_node


def slurm_text(counts: list[int]) -> str:
    """As Slurm writes it: neighbours with the same count are counted together."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(str(n) if times == 1 else f"{n}(x{times})" for n, times in runs)


@given(st.lists(st.integers(1, 12), max_size=8))
def test_tasks_per_node(counts: list[int]) -> None:
    assert tasks_per_node(slurm_text(counts)) == counts


NAME = st.from_regex(r"[a-z]([a-z0-9-]{0,4}[a-z-])?", fullmatch=True)
# The first number of a range, how many follow it, and how wide it is written.
RANGE = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4))


def short_and_long(ranges: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """`[03-05,9]`, and what it stands for."""
    short, long = [], []
    for first, more, width in ranges:
        start = f"{first:0{width}}"
        short.append(start if not more else f"{start}-{first + more:0{len(start)}}")
        long += [f"{number:0{len(start)}}" for number in range(first, first + more + 1)]
    return f"[{','.join(short)}]", long


@given(
    st.lists(
        st.tuples(NAME, st.lists(RANGE, max_size=3), st.sampled_from(["", "-ib", ".cluster"])),
        max_size=3,
    )
)
def test_a_list_of_nodes(groups: list[tuple[str, list[tuple[int, int, int]], str]]) -> None:
    texts, names = [], []
    for prefix, ranges, suffix in groups:
        short, long = short_and_long(ranges) if ranges else ("", [""])
        texts.append(f"{prefix}{short}{suffix}")
        names += [f"{prefix}{number}{suffix}" for number in long]
    assert expand_nodes(",".join(texts)) == names


def test_examples() -> None:
    assert expand_nodes("node[03-05,9],login") == ["node03", "node04", "node05", "node9", "login"]
    assert expand_nodes("rack[2-3]node[09-10]") == [
        "rack2node09",
        "rack2node10",
        "rack3node09",
        "rack3node10",
    ]
    assert expand_nodes("n[8-11]") == ["n8", "n9", "n10", "n11"]


@pytest.mark.parametrize(
    "text",
    ["n[1-2", "n1-2]", "n[]", "n[a-b]", "n[5-3]", "a,,b", "a b", "n[0-999999999]",
     "n[0-999][0-999]", "n[[1]]", ",a"],
)  # fmt: skip
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(UserError, match="is no list of nodes"):
        expand_nodes(text)

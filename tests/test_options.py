"""The text form of a dataclass: there and back, and clear words for what it cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.options import format_options, parse_options


@dataclass(frozen=True)
class Span:
    """Something with a text form of its own."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"

    @staticmethod
    def parse(text: str) -> Span:
        first, dots, last = text.partition("..")
        if not dots or not (first + last).isdecimal() or not (first + last).isascii():
            raise UserError(f"span {text!r} is not first..last.")
        return Span(int(first or 0), int(last or 0))


@dataclass(frozen=True)
class Plan:
    every: int = 8
    rate: float = 0.5
    codec: Literal["none", "int8", "fp16"] = "fp16"
    tiles: tuple[int, int] = (1, 1)
    sizes: tuple[int, ...] = (4,)
    overlap: bool = False
    keep: bool = True
    limit: int | None = None
    label: str = "plain"
    span: Span | None = field(default=None, metadata={"parse": Span.parse})


def parse(text: str) -> Plan:
    return parse_options(Plan, text, what="plan 'x'")


plans = st.builds(
    Plan,
    every=st.integers(),
    rate=st.floats(allow_nan=False),
    codec=st.sampled_from(["none", "int8", "fp16"]),
    tiles=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    sizes=st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple),
    overlap=st.booleans(),
    keep=st.booleans(),
    limit=st.none() | st.integers(),
    label=st.from_regex(r"[a-z]+", fullmatch=True),
    span=st.none() | st.builds(Span, st.integers(0, 99), st.integers(0, 99)),
)


@given(plans)
@settings(max_examples=100, deadline=None)
def test_there_and_back(plan: Plan) -> None:
    assert parse(format_options(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), ""),
        (Plan(every=2, tiles=(2, 3)), "every=2,tiles=2x3"),
        (Plan(overlap=True, keep=False), "overlap,keep=false"),
        (Plan(rate=0.05, limit=7), "rate=0.05,limit=7"),
        (Plan(every=2, span=Span(3, 7)), "every=2,span=3..7"),
    ],
)
def test_the_text_says_what_differs(plan: Plan, text: str) -> None:
    assert format_options(plan) == text
    assert parse(text) == plan


def test_spaces_and_stray_commas_do_not_matter() -> None:
    assert parse(" every = 2 ,, overlap , ") == Plan(every=2, overlap=True)


@pytest.mark.parametrize("yes", ["overlap", "overlap=true", "overlap=Yes", "overlap=1"])
def test_the_ways_to_say_yes(yes: str) -> None:
    assert parse(yes).overlap is True


@pytest.mark.parametrize("no", ["keep=false", "keep=no", "keep=0"])
def test_the_ways_to_say_no(no: str) -> None:
    assert parse(no).keep is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evry=2", "plan 'x' has no option 'evry'. Did you mean 'every'?"),
        ("=2", "plan 'x' has no option ''. Known: codec, every,"),
        ("every=2,rate=1,every=3", "option 'every' is given twice in 'every=2,rate=1,every=3'"),
        ("every", "option 'every' needs a value, such as every=…"),
        ("every=", "every='' is not a whole number"),
        ("every=2.5", "every='2.5' is not a whole number"),
        ("rate=fast", "rate='fast' is not a number"),
        ("rate=nan", "rate='nan' is not a number"),
        ("codec=int9", "codec='int9' is not a choice. Did you mean 'int8'?"),
        ("overlap=perhaps", "overlap='perhaps' is not yes or no. Write true or false."),
        ("tiles=2", "tiles='2' is not 2 values, such as 2x2"),
        ("tiles=2x2x2", "tiles='2x2x2' is not 2 values, such as 2x2"),
        ("tiles=2xtwo", "tiles='two' is not a whole number"),
        ("limit=many", "limit='many' is not a whole number"),
        ("span=3-7", "span '3-7' is not first..last."),
        ("span", "option 'span' needs a value, such as span=…"),
    ],
)
def test_what_cannot_be_is_said_with_its_value(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert message in str(error.value)


def test_none_is_said_where_it_is_allowed() -> None:
    assert parse("span=none,limit=None") == Plan()


@given(st.text(max_size=20))
@settings(max_examples=100, deadline=None)
def test_any_text_is_either_read_or_refused(text: str) -> None:
    try:
        plan = parse(text)
    except UserError:
        return
    assert parse(format_options(plan)) == plan

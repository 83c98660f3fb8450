"""A codec and its text form say the same thing, and nonsense is refused with its value."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.codecs import (
    CODECS,
    Bf16,
    Codec,
    Fp16,
    Int8,
    PowerSgd,
    RandK,
    Sign,
    TopK,
    parse,
)
from farandole.errors import UserError

ratios = st.floats(min_value=0, max_value=1, exclude_min=True)
codecs = st.one_of(
    st.builds(Fp16),
    st.builds(Bf16),
    st.builds(Int8, block=st.integers(1, 10**6), feedback=st.booleans()),
    st.builds(TopK, ratio=ratios, feedback=st.booleans()),
    st.builds(RandK, ratio=ratios, feedback=st.booleans(), seed=st.integers()),
    st.builds(Sign, feedback=st.booleans()),
    st.builds(
        PowerSgd,
        rank=st.integers(1, 10**6),
        warm_steps=st.integers(0, 10**6),
        feedback=st.booleans(),
    ),
)


@given(codecs)
def test_text_and_back(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert "," not in str(codec)  # which parts the options of the strategy around it


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Fp16(), "fp16"),
        (Int8(block=64), "int8:block=64"),
        (TopK(ratio=0.02, feedback=False), "topk:ratio=0.02/feedback=false"),
        (PowerSgd(rank=4, warm_steps=10), "powersgd:rank=4/warm_steps=10"),
    ],
)
def test_text_says_only_what_differs_from_the_defaults(codec: Codec, text: str) -> None:
    assert str(codec) == text
    assert parse(f" {text} ") == codec


@pytest.mark.parametrize("kind", CODECS.values())
def test_codecs_are_frozen_and_known_by_name(kind: type[Codec]) -> None:
    codec = kind()
    assert parse(kind.name) == codec
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "there is no codec 'int9'. Did you mean 'int8'?"),
        ("", "there is no codec ''. Known: bf16, fp16, int8, powersgd, randk, sign, topk."),
        ("int8:blok=3", "codec 'int8' has no option 'blok'. Did you mean 'block'?"),
        ("fp16:feedback=false", "codec 'fp16' has no option 'feedback'"),
        ("int8:block=0", "int8: block=0 must be at least 1"),
        ("powersgd:rank=0", "powersgd: rank=0 must be at least 1"),
        ("powersgd:warm_steps=-1", "powersgd: warm_steps=-1 must be at least 0"),
        ("topk:ratio=0", "topk: ratio=0 must be above 0 and at most 1"),
        ("topk:ratio=1.5", "topk: ratio=1.5 must be above 0 and at most 1"),
        ("randk:ratio=-1", "randk: ratio=-1 must be above 0 and at most 1"),
        ("randk:ratio=few", "ratio='few' is not a number"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", [TopK, RandK])
def test_a_ratio_that_is_no_number(kind: type[TopK]) -> None:
    with pytest.raises(UserError, match="ratio=nan"):
        kind(ratio=math.nan)

"""Codecs between one client and one server: fewer bytes, and what is left out comes later."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.codecs import Codec, PowerSgd
from farandole.errors import UserError
from farandole.server.filters import Coding, coded_bytes, decode, encode, parse_codec

USABLE = ["fp16", "bf16", "int8:block=64", "sign", "topk:ratio=0.1"]
FEEDBACK = ["int8:block=64", "sign", "topk:ratio=0.1"]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random_matrix(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


@given(
    text=st.sampled_from(USABLE),
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 40),
    width=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_there_and_back(text: str, dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    codec, values = parse_codec(text), random_matrix(seed, rows, width, dtype)
    encoded = encode(codec, values)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (coded_bytes(codec, rows * width, dtype),)
    assert encoded.numel() <= values.nbytes
    decoded = decode(codec, encoded.clone(), values.shape, dtype)
    assert decoded.shape == values.shape
    assert decoded.dtype == dtype
    if encoded.numel() == values.nbytes:
        assert torch.equal(decoded, values), "as it was"
    elif codec.name in ("fp16", "bf16", "int8"):
        # int8 rounds by at most half of a 127th of the largest; float16 and bfloat16 by less.
        far = float((decoded.double() - values.double()).abs().max())
        assert far <= float(values.double().abs().max()) / 127
    elif codec.name == "topk":
        is_sent = decoded != 0
        assert torch.equal(decoded[is_sent], values[is_sent])
        assert float(values[~is_sent].abs().max()) <= float(values[is_sent].abs().min())
    else:
        assert torch.equal(decoded.sign(), torch.where(values < 0, -1.0, 1.0).to(dtype))


@pytest.mark.parametrize(
    ("text", "times"), [("fp16", 1.9), ("bf16", 1.9), ("int8", 3.8), ("sign", 31), ("topk", 49)]
)
def test_large_pushes_get_smaller(text: str, times: float) -> None:
    assert 10**5 * 4 / coded_bytes(parse_codec(text), 10**5, torch.float32) > times


@pytest.mark.parametrize("text", USABLE)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_not_hidden(text: str, bad: float) -> None:
    values = random_matrix(0, 50, 4, torch.float32)
    values[7, 2] = bad
    coding = Coding(parse_codec(text), 50, 4, torch.float32)
    decoded = decode(coding.codec, coding.encode(None, values), values.shape, torch.float32)
    assert not bool(decoded.isfinite().all())
    _, left = coding.flush()
    assert bool(left.isfinite().all()), "and leaves no trace"


@pytest.mark.parametrize("text", FEEDBACK)
@given(
    lists=st.lists(st.sets(st.integers(0, 199)).map(sorted) | st.none(), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_what_is_left_out_comes_later(text: str, lists: list[list[int] | None], seed: int) -> None:
    rows, width = 200, 2
    coding = Coding(parse_codec(text), rows, width, torch.float64)
    offered, arrived = (torch.zeros(rows, width, dtype=torch.float64) for _ in range(2))
    for number, chosen in enumerate(lists):
        where = None if chosen is None else torch.tensor(chosen, dtype=torch.int64)
        places = torch.arange(rows) if where is None else where
        values = random_matrix(seed + number, len(places), width, torch.float64)
        before = values.clone()
        encoded = coding.encode(where, values)
        assert torch.equal(values, before), "the caller's own"
        offered[places] += values
        arrived[places] += decode(coding.codec, encoded, values.shape, torch.float64)
    left_rows, left = coding.flush()
    arrived[left_rows] += left
    torch.testing.assert_close(arrived, offered, rtol=1e-12, atol=1e-12)
    assert not len(coding.flush()[0]), "it was sent"


@pytest.mark.parametrize("text", ["fp16", "int8:feedback=false", "topk:feedback=false"])
def test_without_feedback_nothing_is_kept(text: str) -> None:
    coding = Coding(parse_codec(text), 500, 2, torch.float32)
    values = random_matrix(0, 500, 2, torch.float32)
    assert torch.equal(coding.encode(None, values), coding.encode(None, values))
    rows, left = coding.flush()
    assert rows.shape == (0,)
    assert left.shape == (0, 2)
    assert coding.state_dict() == {}


@pytest.mark.parametrize("text", USABLE)
def test_going_on_from_a_state(text: str) -> None:
    through, resumed = (Coding(parse_codec(text), 500, 2, torch.float32) for _ in range(2))
    through.encode(None, random_matrix(0, 500, 2, torch.float32))
    resumed.encode(None, random_matrix(9, 500, 2, torch.float32))  # which is to be forgotten
    resumed.load_state_dict(through.state_dict())
    for seed in (1, 2):
        values = random_matrix(seed, 500, 2, torch.float32)
        assert torch.equal(through.encode(None, values), resumed.encode(None, values))


def test_savings_are_counted() -> None:
    coding = Coding(parse_codec("int8:block=100"), 500, 2, torch.float32)
    coding.encode(None, random_matrix(0, 500, 2, torch.float32))
    coding.encode(torch.arange(250), random_matrix(1, 250, 2, torch.float32))
    coded = (10 * 4 + 1000) + (24 + 504)  # scales and codes, each rounded up to 8 bytes
    savings = coding.savings
    assert (savings.rows_offered, savings.rows_sent) == (750, 750)
    assert (savings.bytes_offered, savings.bytes_sent) == (6000, coded)
    rows, _ = coding.flush()
    assert len(rows) > 400
    assert savings.rows_sent == 750 + len(rows)
    assert savings.bytes_sent == coded + len(rows) * 2 * 4
    assert savings.bytes_offered == 6000


@pytest.mark.parametrize("text", ["powersgd", "powersgd:rank=4", "randk"])
def test_codecs_that_need_a_group(text: str) -> None:
    name = text.partition(":")[0]
    with pytest.raises(
        UserError, match=f"'{name}' needs all ranks.* Usable here: bf16, fp16, int8, sign, topk"
    ):
        parse_codec(text)


def test_a_codec_that_is_none() -> None:
    with pytest.raises(UserError, match="there is no codec 'int9'"):
        parse_codec("int9")


def test_a_codec_that_was_not_asked_about() -> None:
    codec: Codec = PowerSgd()
    with pytest.raises(AssertionError, match="powersgd came past parse_codec"):
        Coding(codec, 10, 1, torch.float32)


def test_tables_of_whole_numbers() -> None:
    with pytest.raises(UserError, match=r"takes floating-point tables; this one is torch\.int32"):
        Coding(parse_codec("int8"), 10, 1, torch.int32)


def test_bytes_of_something_else_are_refused() -> None:
    codec = parse_codec("int8:block=64")
    encoded = encode(codec, random_matrix(0, 100, 1, torch.float32))
    with pytest.raises(UserError, match=r"\(50, 2\) of torch.float64 take 120 bytes.*and 112 came"):
        decode(codec, encoded, (50, 2), torch.float64)


def test_places_outside_are_refused() -> None:
    codec = parse_codec("topk:ratio=0.01")
    encoded = encode(codec, random_matrix(0, 100, 1, torch.float32))
    encoded[:4].view(torch.int32).fill_(100)
    with pytest.raises(UserError, match="must be below 100; 100 is not"):
        decode(codec, encoded, (100, 1), torch.float32)

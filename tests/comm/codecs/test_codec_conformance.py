"""What holds for every codec: one suite, run against each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm import Group
from farandole.comm.codecs import CODECS, Codec, parse
from farandole.comm.codecs.codec import SMALL_ELEMENTS
from farandole.errors import UserError
from farandole.serialization import pack, unpack

OnRanks = Callable[[int, Callable[[Group], Any]], list[Any]]
Tensors = dict[str, torch.Tensor]

TEXTS = [
    "fp16", "bf16", "int8", "int8:block=7/feedback=false", "topk:ratio=0.05", "randk",
    "randk:feedback=false", "sign", "sign:feedback=false", "powersgd", "powersgd:warm_steps=2",
]  # fmt: skip
WITH_FEEDBACK = ["int8", "topk:ratio=0.05", "randk", "sign", "powersgd:rank=3"]
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (40, 50),
    "bias": (50,),
    "kernel": (8, 16, 3, 3),
    "vector": (1025,),
    "scalar": (),
    "nothing": (0, 3),
}


@pytest.fixture(params=TEXTS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return parse(request.param)


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def mean(size: int, name: str, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    parts = [gradients(rank, step, dtype)[name].double() for rank in range(size)]
    return torch.stack(parts).mean(0)


def assert_same(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def is_compressed(codec: Codec, name: str, size: int, dtype: torch.dtype = torch.float32) -> bool:
    return codec.compresses(SHAPES[name], dtype.itemsize, size)


def test_every_codec_is_in_this_suite() -> None:
    assert {parse(text).name for text in TEXTS} == set(CODECS)
    lossy = {name for name, kind in CODECS.items() if "feedback" in fields(kind())}
    assert {parse(text).name for text in WITH_FEEDBACK} == lossy


def fields(codec: Codec) -> set[str]:
    return {field.name for field in dataclasses.fields(codec)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_same_bits_on_every_rank_step_after_step(
    codec: Codec, size: int, on_ranks: OnRanks
) -> None:
    def body(group: Group) -> list[Tensors]:
        compressor, results = codec.build(), []
        for step in range(3):
            mine = gradients(group.rank, step)
            compressor.average(mine, group)
            results.append(mine)
        return results

    ranks = on_ranks(size, body)
    for results in ranks:
        for step, result in enumerate(results):
            assert_same(result, ranks[0][step])
            for name, shape in SHAPES.items():
                assert result[name].shape == shape


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_what_travels_raw_is_the_average(
    codec: Codec, dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    def body(group: Group) -> Tensors:
        mine = gradients(group.rank, dtype=dtype)
        codec.build().average(mine, group)
        return mine

    for result in on_ranks(3, body):
        for name in ("bias", "scalar"):
            assert not is_compressed(codec, name, 3, dtype)
            assert result[name].dtype == dtype
            expected = mean(3, name, dtype=dtype).to(dtype)
            precision = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(result[name], expected, rtol=precision, atol=precision)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("text", WITH_FEEDBACK)
def test_nothing_is_lost_only_late(text: str, dtype: torch.dtype, on_ranks: OnRanks) -> None:
    """What has come out so far, and what all ranks still hold, is what was put in."""
    codec, size, steps = parse(text), 3, 6

    def body(group: Group) -> tuple[Tensors, dict[str, Any]]:
        compressor = codec.build()
        sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(steps):
            mine = gradients(group.rank, step, dtype)
            compressor.average(mine, group)
            for name, tensor in mine.items():
                sums[name] += tensor
        return sums, compressor.state_dict()

    results = on_ranks(size, body)
    compressed = [name for name in SHAPES if is_compressed(codec, name, size, dtype)]
    assert {"matrix", "kernel"} <= set(compressed)
    assert compressed == sorted(results[0][1], key=list(SHAPES).index)
    for name in compressed:
        held = torch.zeros(SHAPES[name], dtype=torch.float64).view(-1)
        # A row of a tensor is owned by one rank, the last one filled up with zeros.
        owned = [state[name].get("owned_left") for _, state in results]
        if owned[0] is not None:
            held += torch.cat(owned).double()[: held.numel()]
        for _, state in results:
            held += state[name]["left"].double()
        put_in = sum(mean(size, name, step, dtype) for step in range(steps))
        came_out = results[0][0][name] + held.view(SHAPES[name])
        # The result itself is rounded to the dtype of the gradient once a step.
        precision = steps * torch.finfo(dtype).eps
        torch.testing.assert_close(came_out, put_in, rtol=0, atol=4 * precision)


@pytest.mark.parametrize("text", [*WITH_FEEDBACK, "fp16", "bf16"])
def test_a_constant_gradient_arrives_in_the_mean(text: str, on_ranks: OnRanks) -> None:
    codec, steps = parse(text), 80
    wanted = torch.randn(1200, generator=torch.Generator().manual_seed(1)).view(40, 30)

    def body(group: Group) -> list[float]:
        compressor = codec.build()
        total, errors = torch.zeros_like(wanted), []
        for step in range(1, steps + 1):
            # Half the ranks' difference must cancel out.
            mine = wanted + (0.5 if group.rank else -0.5)
            compressor.average({"w": mine}, group)
            total += mine
            errors.append(((total / step - wanted).norm() / wanted.norm()).item())
        return errors

    for errors in on_ranks(2, body):
        assert errors[-1] < max(errors[0] / 5, 0.01)


def test_it_does_not_matter_which_tensors_travel_together(codec: Codec, on_ranks: OnRanks) -> None:
    """DDP's buckets are others after a resume; the bits must not be."""
    buckets = [["vector"], ["scalar", "kernel", "bias"], ["matrix", "nothing"]]

    def body(group: Group) -> None:
        together, apart = codec.build(), codec.build()
        for step in range(2):
            whole, parts = gradients(group.rank, step), gradients(group.rank, step)
            together.average(whole, group)
            for bucket in buckets:
                apart.average({name: parts[name] for name in bucket}, group)
            assert_same(parts, whole)

    on_ranks(3, body)


def test_going_on_from_a_checkpoint(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> None:
        never_stopped, went_on = codec.build(), codec.build()
        for step in range(6):
            if step == 3:
                # As a checkpoint stores it: JSON and tensors.
                tree, tensors = pack(went_on.state_dict())
                stored = {name: tensor.clone() for name, tensor in tensors.items()}
                went_on = codec.build()
                went_on.load_state_dict(unpack(json.loads(json.dumps(tree)), stored))
            whole, cut = gradients(group.rank, step), gradients(group.rank, step)
            never_stopped.average(whole, group)
            went_on.average(cut, group)
            assert_same(cut, whole)

    on_ranks(3, body)


def test_a_saved_state_is_not_changed_by_what_comes_later(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> None:
        compressor = codec.build()
        compressor.average(gradients(group.rank), group)
        _, tensors = pack(compressor.state_dict())
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        compressor.average(gradients(group.rank, 1), group)
        assert_same(tensors, before)

    on_ranks(2, body)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_heard_by_all_and_forgotten(
    codec: Codec, bad: float, on_ranks: OnRanks
) -> None:
    def body(group: Group) -> None:
        disturbed, quiet = codec.build(), codec.build()
        for compressor in (disturbed, quiet):
            compressor.average(gradients(group.rank), group)
        mine = gradients(group.rank, 1)
        if group.rank == 1:
            mine["matrix"].view(-1)[1234] = bad  # of 2,000: only some codecs would choose it
        disturbed.average({"matrix": mine["matrix"]}, group)
        if is_compressed(codec, "matrix", group.size):
            assert mine["matrix"].isnan().all()
        for step in range(2, 5):
            after, expected = gradients(group.rank, step), gradients(group.rank, step)
            disturbed.average({"matrix": after["matrix"]}, group)
            quiet.average({"matrix": expected["matrix"]}, group)
            assert after["matrix"].isfinite().all()
            assert torch.equal(after["matrix"], expected["matrix"])

    on_ranks(3, body)


def test_nothing_at_all(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> Tensors:
        compressor = codec.build()
        for _ in range(2):
            zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            compressor.average(zeros, group)
            compressor.average({}, group)
        after = gradients(group.rank)
        compressor.average(after, group)  # zeros have left nothing that stands in the way
        assert after["matrix"].norm() > 0
        return zeros

    for zeros in on_ranks(3, body):
        assert all(not tensor.any() for tensor in zeros.values())


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_any_order_of_magnitude(codec: Codec, size: float, on_ranks: OnRanks) -> None:
    """Scaled gradients give scaled averages: float16 neither overflows nor rounds to zero."""

    def body(group: Group) -> tuple[Tensors, Tensors]:
        one, other = codec.build(), codec.build()
        for step in range(3):
            plain, scaled = gradients(group.rank, step), gradients(group.rank, step)
            for tensor in scaled.values():
                tensor.mul_(size)
            one.average(plain, group)
            other.average(scaled, group)
        return plain, scaled

    for plain, scaled in on_ranks(2, body):
        difference = (scaled["matrix"] / size - plain["matrix"]).norm() / plain["matrix"].norm()
        assert difference < 0.05


def test_views_that_are_not_contiguous(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> None:
        mine = gradients(group.rank)["matrix"]
        around = torch.zeros(50, 80)
        view = around[:, ::2].T
        view.copy_(mine)
        codec.build().average({"w": view}, group)
        codec.build().average({"w": mine}, group)
        assert torch.equal(view, mine)
        assert not around[:, 1::2].any()

    on_ranks(2, body)


def test_alone_nothing_is_changed(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> None:
        mine = gradients(0)
        compressor = codec.build()
        compressor.average(mine, group)
        assert_same(mine, gradients(0))
        assert compressor.state_dict() == {}
        assert group.meter.bytes_sent == 0

    on_ranks(1, body)
    assert codec.wire_bytes((100, 100), 4, 1) == 0
    assert codec.times_smaller((100, 100), 4, 1) == 1


def test_integers_are_refused(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> None:
        whole = torch.arange(2000)
        with pytest.raises(UserError, match=rf"codec {codec}.*'counts' is torch.int64"):
            codec.build().average({"counts": whole}, group)

    on_ranks(2, body)


def test_an_algorithm_for_what_travels_raw(codec: Codec, on_ranks: OnRanks) -> None:
    def body(group: Group) -> tuple[Tensors, Tensors]:
        plain, asked = gradients(group.rank), gradients(group.rank)
        codec.build().average(plain, group)
        codec.build("ring").average(asked, group)
        return plain, asked

    ranks = on_ranks(3, body)
    for plain, asked in ranks:
        assert_same(asked, ranks[0][1])
        for name in SHAPES:
            torch.testing.assert_close(asked[name], plain[name], rtol=1e-3, atol=1e-3)


@given(
    text=st.sampled_from([text for text in TEXTS if "warm" not in text]),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    size=st.integers(2, 5),
)
@settings(max_examples=30, deadline=None)
def test_the_bytes_stated_are_the_bytes_sent(
    on_ranks: OnRanks, text: str, shape: tuple[int, ...], dtype: torch.dtype, size: int
) -> None:
    codec = parse(text)

    def body(group: Group) -> int:
        compressor = codec.build()
        compressor.average({"w": torch.randn(shape).to(dtype)}, group)
        before = group.meter.bytes_sent
        compressor.average({"w": torch.randn(shape).to(dtype)}, group)
        return group.meter.bytes_sent - before

    sent = on_ranks(size, body)
    stated = codec.wire_bytes(shape, dtype.itemsize, size)
    count = torch.Size(shape).numel()
    raw = 2 * (size - 1) * count * dtype.itemsize // size
    assert stated <= raw
    assert count >= SMALL_ELEMENTS or stated == raw
    # What does not divide evenly makes some ranks send more, or is filled up: to a number each, and
    # to whole words. What is compressed is stated as it is filled up.
    filling = 2 * (size - 1) * (dtype.itemsize + 7) if stated == raw else 2
    assert stated == pytest.approx(sum(sent) / size, abs=filling)

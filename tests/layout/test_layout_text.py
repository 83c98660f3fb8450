"""A layout and its text are the same thing, and a layout that cannot be says why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole import Layout, UserError
from farandole.layout import parse_layout

names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}(\.[a-z0-9_]{1,4}){0,2}", fullmatch=True)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any that is allowed."""
    schedule = draw(
        st.sampled_from(
            ["layer", "gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "pipedream", "2bw"]
        )
    )
    stages, micros = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    options: dict[str, Any] = {"schedule": schedule, "chunks": draw(st.integers(1, 4))}
    simple = schedule in ("layer", "gpipe", "1f1b")
    if simple and draw(st.booleans()):
        options |= {"bidirectional": True, "pairs": draw(st.integers(1, 3))}
        micros = 2 * options["pairs"] * draw(st.integers(1, 5))
    elif schedule in ("gpipe", "1f1b", "pipedream") and draw(st.booleans()):
        counts = st.lists(st.integers(1, 5), min_size=stages, max_size=stages)
        options["replicas"] = tuple(draw(counts))
    if schedule == "layer" and not options.get("bidirectional"):
        micros = 1
    elif schedule == "interleaved":
        stages *= options["chunks"]
    elif schedule == "gems":
        micros *= 2
    elif schedule == "2bw":
        micros += stages
    elif schedule == "pipedream":
        micros = 1
        if max(options.get("replicas", (1,))) == 1:
            options["vertical"] = draw(st.booleans())
        if not options.get("vertical"):
            options["stash"] = draw(st.booleans())
    if draw(st.booleans()):
        counts = st.lists(st.integers(1, 30), min_size=stages, max_size=stages)
        options["balance"] = tuple(draw(counts))
    if schedule != "zero-bubble":
        options["recompute"] = draw(st.booleans())
    batchnorm = draw(st.sampled_from(["micro", "deferred"]))
    if schedule in ("layer", "gpipe", "1f1b", "interleaved", "gems") and "replicas" not in options:
        tiles = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        options |= {"tiles": tiles, "channels": draw(st.integers(1, 3))}
        if Layout(tiles=tiles, channels=options["channels"]).shards > 1:
            options |= {
                "halo": draw(st.integers(1, 5) | st.just("auto")),
                "overlap": draw(st.booleans()),
                "in_turn": draw(st.booleans()),
                "handoff": draw(st.just("") | names),
            }
    if options.get("recompute"):
        options |= {"recompute_blocks": draw(st.integers(0, 3)), "offload": draw(st.booleans())}
    return Layout(
        stages=stages,
        microbatches=micros,
        cuts=tuple(draw(st.lists(names, max_size=3))),
        batchnorm=batchnorm,
        reduction=draw(st.sampled_from(["mean", "sum"])),
        memory_gib=draw(st.none() | st.floats(1e-3, 1e3)),
        **options,
    )


@settings(max_examples=150, derandomize=True)
@given(layouts())
def test_the_text_is_the_layout(layout: Layout) -> None:
    again = parse_layout(str(layout))
    assert again == layout
    assert str(again) == str(layout)
    assert hash(again) == hash(layout)


def test_texts_that_people_write() -> None:
    assert parse_layout("stages=4, microbatches=8") == Layout(stages=4, microbatches=8)
    assert parse_layout("stages=auto,schedule=gpipe").stages == "auto"
    assert parse_layout("stages=2,balance=3+4,replicas=2+1,recompute").ranks == 3
    assert parse_layout("stages=2,cuts=body.0+head").cuts == ("body.0", "head")
    assert parse_layout("tiles=2x3,channels=2").shards == 12
    assert str(Layout(tiles=(2, 2), halo=3)) == "tiles=2x2,halo=3"
    assert str(Layout()) == "stages=1"
    assert str(Layout(stages=2, balance=(3, 4), stash=False, schedule="pipedream")) == (
        "stages=2,schedule=pipedream,balance=3+4,stash=false"
    )


@pytest.mark.parametrize(
    ("text", "ranks", "mirrored", "streams"),
    [
        ("stages=4,microbatches=8", 4, False, False),
        ("stages=8,schedule=interleaved,chunks=4", 2, False, False),
        ("stages=3,replicas=2+1+2", 5, False, False),
        ("stages=4,microbatches=4,schedule=gems", 4, True, False),
        ("stages=4,microbatches=4,bidirectional", 4, True, False),
        ("stages=4,schedule=pipedream", 4, False, True),
        ("stages=4,microbatches=4,schedule=2bw", 4, False, True),
        ("stages=3,tiles=2x2", 12, False, False),
        ("stages=3,tiles=2x2,tiled=1", 6, False, False),
        ("stages=3,tiles=2x2,in_turn", 3, False, False),
        ("stages=4,chunks=2,schedule=interleaved,tiles=3", 6, False, False),
        ("stages=3,tiles=2x2,channels=2,microbatches=4,bidirectional", 24, True, False),
    ],
)
def test_what_a_layout_says_of_itself(text: str, ranks: int, mirrored: bool, streams: bool) -> None:
    layout = parse_layout(text)
    assert (layout.ranks, layout.mirrored, layout.streams) == (ranks, mirrored, streams)


def test_auto_takes_as_many_ranks_as_there_are() -> None:
    with pytest.raises(UserError, match="as many ranks as there are"):
        _ = Layout(stages="auto").ranks


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # one of each rule about combinations, in their order
        (
            "stages=2,schedule=layer,microbatches=3",
            "schedule=layer has one micro-batch, not 3; take gpipe or 1f1b",
        ),
        (
            "stages=2,schedule=zero-bubble,microbatches=2,bidirectional",
            "bidirectional goes with layer, gpipe, 1f1b, not with zero-bubble",
        ),
        (
            "stages=2,microbatches=6,bidirectional,pairs=2",
            "two directions in 2 turn(s) need micro-batches in multiples of 4, not 6",
        ),
        ("stages=2,microbatches=4,pairs=2", "pairs=2 is for bidirectional layouts"),
        (
            "stages=3,schedule=interleaved",
            "chunks=2 stages on each rank do not divide stages=3",
        ),
        (
            "stages=2,schedule=zero-bubble,replicas=2+1",
            "replicas of single stages go with gpipe, 1f1b and pipedream, not with zero-bubble",
        ),
        (
            "stages=2,schedule=pipedream,microbatches=2",
            "pipedream updates after every batch, whole: leave microbatches out, or take 2bw",
        ),
        (
            "stages=4,schedule=2bw,microbatches=3",
            "enough from microbatches=4 (the stages) on, not with 3",
        ),
        ("stages=2,vertical", "vertical is for pipedream with one rank for each stage"),
        ("stages=2,stash=false", "stash=false is for pipedream, and not with vertical"),
        (
            "stages=2,schedule=zero-bubble,recompute",
            "zero-bubble splits the backward in two; recompute would do its work twice",
        ),
        (
            "stages=auto,schedule=interleaved",
            "stages=auto goes with gpipe, 1f1b and pipedream, not with interleaved",
        ),
        ("stages=2,recompute_blocks=2", "recompute_blocks=2 is for recompute"),
        ("stages=2,tiled=1", "tiled=1 is for layouts with tiles"),
        ("handoff=head", "handoff=head is for layouts with tiles"),
        ("tiles=1x1,in_turn", "in_turn is for layouts with tiles"),
        ("tiles=2x2,schedule=zero-bubble", "interleaved and gems in a fixed number of stages"),
        ("tiles=2x2,stages=auto", "interleaved and gems in a fixed number of stages"),
        ("stages=2,tiles=2,replicas=1+2", "replicas of single stages do not go with tiles"),
        ("stages=2,tiles=2,tiled=3", "tiled=3 of stages=2"),
        ("stages=2,microbatches=2,tiles=2,tiled=1,bidirectional", "leave tiled out"),
        ("stages=2,tiles=2,tiled=1,in_turn", "leave tiled out"),
        # and other ways to break some of them
        ("schedule=gems,microbatches=3", "need micro-batches in multiples of 2, not 3"),
        (
            "stages=2,microbatches=2,bidirectional,replicas=2+1",
            "not with 1f1b, bidirectional",
        ),
        (
            "stages=2,schedule=pipedream,vertical,replicas=2+1",
            "vertical is for pipedream with one rank for each stage",
        ),
        ("stages=2,schedule=pipedream,vertical,stash=false", "and not with vertical"),
        # numbers
        ("stages=0", "stages=0 must be at least 1"),
        ("microbatches=-1", "microbatches=-1 must be at least 1"),
        ("chunks=0", "chunks=0 must be at least 1"),
        ("pairs=0", "pairs=0 must be at least 1"),
        ("stages=2,balance=3", "balance=3 must be one number, at least 1, for each of stages=2"),
        ("stages=2,replicas=1+0", "replicas=1+0 must be one number"),
        ("stages=auto,replicas=1+2", "replicas=1+2 must be one number"),
        ("memory_gib=0", "memory_gib=0 must be above 0"),
        ("memory_gib=inf", "memory_gib=inf must be above 0"),
        ("tiles=2x0", "tiles=2x0 must be one number, at least 1, for each axis"),
        ("tiles=2x2x2x2", "up to three"),
        ("channels=0", "channels=0 must be at least 1"),
        ("tiles=2x2,halo=0", "halo=0 must be at least 1"),
        ("tiles=2,tiled=-1", "must be at least 0"),
        # words
        ("tiles=2by2", "tiles='2by2' is no grid, such as 2x2"),
        ("tiles=2,halo=wide", "halo='wide' is neither a whole number nor auto"),
        ("stages=many", "stages='many' is neither a whole number nor auto"),
        ("stages=2,balance=1+x", "'1+x' is not a sum of whole numbers, such as 3+2+4"),
        ("stages=2,schedule=1f1", "Did you mean '1f1b'?"),
        ("stages=2,microbatch=3", "Did you mean 'microbatches'?"),
        ("stages", "option 'stages' needs a value"),
        ("stages=2,stages=3", "given twice"),
        ("stages=2,reduction=max", "reduction='max' is not a choice"),
    ],
)
def test_a_layout_that_cannot_be_says_why(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layout(text)
    assert told in str(caught.value)


def test_the_same_words_in_python() -> None:
    with pytest.raises(UserError, match="Did you mean 'gpipe'"):
        Layout(stages=2, schedule="g-pipe")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="batchnorm='late' is not a choice"):
        Layout(stages=2, batchnorm="late")  # type: ignore[arg-type]

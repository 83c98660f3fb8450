"""Options of the local SGD family: what cannot work is refused, and the message says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farandole.comm.codecs import Int8, TopK
from farandole.errors import UserError
from farandole.sync import (
    AdaComm,
    AllReduce,
    DiLoCo,
    Federated,
    Local,
    PostLocal,
    Strategy,
    parse,
)
from farandole.testing import run_world
from farandole.train import Run

FAMILY = [Local, DiLoCo, Federated, AdaComm, PostLocal]

every = st.integers(1, 10_000)
share = st.floats(0, 0.99)
shared = {
    "moments": st.sampled_from(["keep", "average", "reset"]),
    "codec": st.sampled_from([None, Int8(), TopK(ratio=0.3, feedback=False)]),
    "meet_epochs": st.booleans(),
}


@given(
    st.one_of(
        st.builds(Local, every=every, momentum=share, **shared),
        st.builds(DiLoCo, every=every, rate=st.floats(0.01, 5), momentum=share, **shared),
        st.builds(
            Federated, every=every, fraction=st.floats(0.01, 1), seed=st.integers(), **shared
        ),
        st.builds(
            AdaComm,
            start=every,
            seconds=st.floats(0.1, 1e6),
            steps=st.none() | every,
            shrink=st.floats(0.01, 0.99),
            rate=st.sampled_from(["couple", "defer", "ignore"]),
            momentum=share,
            **shared,
        ),
        st.builds(
            PostLocal,
            every=every,
            below=st.floats(0.01, 0.99),
            at=st.none() | share,
            momentum=share,
            **shared,
        ),
    )
)
def test_text_and_back(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy


OUT_OF_RANGE: list[tuple[list[Any], str, list[float]]] = [
    ([Local, DiLoCo, Federated, PostLocal], "every", [0, -3]),
    ([Local, DiLoCo, AdaComm, PostLocal], "momentum", [1, -0.1]),
    ([DiLoCo], "rate", [0, -1, math.inf]),
    ([Federated], "fraction", [0, -0.5, 1.01]),
    ([AdaComm], "start", [0, -1]),
    ([AdaComm], "steps", [0, -1]),
    ([AdaComm], "seconds", [0, -1, math.inf]),
    ([AdaComm], "shrink", [0, 1, 2, -1]),
    ([PostLocal], "below", [0, 1, -0.5]),
    ([PostLocal], "at", [1, -0.1]),
]


@pytest.mark.parametrize(
    ("kind", "option", "bad"),
    [
        (kind, option, bad)
        for kinds, option, values in OUT_OF_RANGE
        for kind in kinds
        for bad in values
    ],
)
def test_out_of_range(kind: Any, option: str, bad: float) -> None:
    """Written in a script, or as text; NaN is in no range."""
    for value in (bad, math.nan):
        with pytest.raises(UserError, match=f"^{kind.name}: {option}={value:g} must be "):
            kind(**{option: value})
    with pytest.raises(UserError, match=rf"{option}=.* (must be |is not a whole number)"):
        parse(f"{kind.name}:{option}={bad}")
    with pytest.raises(UserError, match=f"{option}='nan' is not a "):
        parse(f"{kind.name}:{option}=nan")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local:evry=3", "strategy 'local' has no option 'evry'. Did you mean 'every'?"),
        ("local:every", "option 'every' needs a value"),
        ("local:every=2.5", "every='2.5' is not a whole number"),
        ("local:moments=rest", "moments='rest' is not a choice. Did you mean 'reset'?"),
        ("local:meet_epochs=maybe", "meet_epochs='maybe' is not yes or no"),
        ("local:codec=int9", "there is no codec 'int9'. Did you mean 'int8'?"),
        ("dilocco", "there is no strategy 'dilocco'. Did you mean 'diloco'?"),
        ("federated:momentum=0.9", "strategy 'federated' has no option 'momentum'"),
        ("adacomm:rate=copule", "rate='copule' is not a choice. Did you mean 'couple'?"),
        ("postlocal:at=soon", "at='soon' is not a number"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", FAMILY)
def test_what_is_no_codec(kind: Any) -> None:
    with pytest.raises(UserError, match=rf"{kind.name}: codec=8 is no codec"):
        kind(codec=8)
    assert kind(codec="int8") == kind(codec=Int8())


@pytest.mark.parametrize("kind", FAMILY)
def test_an_optimizer_is_needed(kind: Any, tmp_path: Path) -> None:
    def body(run: Run) -> None:
        message = rf"{kind.name} counts the optimizer's steps and was given none.*distribute\("
        with pytest.raises(UserError, match=message):
            run.distribute(nn.Linear(2, 2))

    run_world(2, body, folder=tmp_path, sync=kind())


@pytest.mark.parametrize("kind", FAMILY)
def test_a_codec_takes_real_numbers(kind: Any, tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(UserError, match=r"codec int8 .*'weight' is torch.complex64"):
            run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))

    run_world(2, body, folder=tmp_path, sync=kind(codec="int8"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Local(moments="rest"),  # type: ignore[arg-type]
        lambda: AdaComm(rate="cuple"),  # type: ignore[arg-type]
        lambda: AllReduce(batchnorm="syn"),  # type: ignore[arg-type]
    ],
)
def test_words_that_are_no_choice_are_refused_in_scripts_too(wrong: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=r"is not a choice\. Did you mean"):
        wrong()

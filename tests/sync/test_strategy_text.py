"""A strategy and its text form say the same thing."""

from __future__ import annotations

import dataclasses
import math

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.cli.options import sync_option
from farandole.errors import UserError
from farandole.sync import STRATEGIES, AllReduce, Server, parse


@given(
    strategy=st.builds(
        AllReduce,
        bucket_mib=st.floats(min_value=1e-6, max_value=1e6),
        batchnorm=st.sampled_from(["local", "sync"]),
        algorithm=st.sampled_from(["auto", "ring"]),
    )
)
def test_text_and_back(strategy: AllReduce) -> None:
    assert parse(str(strategy)) == strategy


def test_text_says_only_what_differs_from_the_defaults() -> None:
    assert str(AllReduce()) == "allreduce"
    assert str(Server(overlap=True, staleness=4)) == "server:staleness=4,overlap"


@pytest.mark.parametrize(
    "text",
    [
        "server:async,overlap",
        "server:staleness=async,overlap=true",
        " server: overlap = yes , async ,",
    ],
)
def test_ways_to_say_the_same(text: str) -> None:
    assert parse(text) == Server(staleness="async", overlap=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allreduse", "no strategy 'allreduse'.*Did you mean 'allreduce'"),
        ("", "no strategy ''.*allreduce"),
        ("allreduce:bucketmib=3", "no option 'bucketmib'.*Did you mean 'bucket_mib'"),
        ("allreduce:bucket_mib", "'bucket_mib' needs a value"),
        ("allreduce:bucket_mib=much", "bucket_mib='much' is not a number"),
        ("allreduce:bucket_mib=0", "bucket_mib=0 must be above 0"),
        ("allreduce:bucket_mib=-3", "bucket_mib=-3 must be above 0"),
        ("allreduce:bucket_mib=nan", "bucket_mib='nan' is not a number"),
        ("allreduce:batchnorm=synk", "batchnorm='synk' is not a choice.*Did you mean 'sync'"),
        ("server:overlap=maybe", "overlap='maybe' is not yes or no"),
        ("server:overlap,overlap=no", "'overlap' is given twice"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


@pytest.mark.parametrize("kind", STRATEGIES.values())
def test_strategies_are_frozen_and_known_by_name(kind: type[AllReduce]) -> None:
    strategy = kind()
    assert parse(kind.name) == strategy
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.algorithm = "ring"  # type: ignore[misc]


@pytest.mark.parametrize("bucket_mib", [0.0, -1.0, math.nan, math.inf])
def test_buckets_of_no_size(bucket_mib: float) -> None:
    with pytest.raises(UserError, match=f"bucket_mib={bucket_mib:g} must be above 0"):
        AllReduce(bucket_mib=bucket_mib)


def test_the_help_of_the_command_line_names_them_all() -> None:
    @click.command()
    @sync_option()
    def command() -> None: ...

    (option,) = command.params
    assert isinstance(option, click.Option)
    assert option.help is not None
    assert f": {', '.join(STRATEGIES)}; " in option.help

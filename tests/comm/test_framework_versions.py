"""Ranks that have other releases of a framework are told so when they meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farandole.comm import Group
from farandole.comm.framework_versions import require_same_frameworks
from farandole.errors import UserError


def meet(on_ranks: Any, *imported: dict[str, str]) -> list[Any]:
    def body(group: Group) -> None:
        versions = imported[group.rank].items()
        found = {name: SimpleNamespace(__version__=version) for name, version in versions}
        require_same_frameworks(group, found)

    return on_ranks(len(imported), body)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "imported",
    [
        [{}, {}],
        [{"tensorflow": "2.21.0"}, {}, {"keras": "3.15.0"}],
        [{"tensorflow": "2.21.0", "keras": "3.15.0"}, {"tensorflow": "2.21.1+local"}],
    ],
)
def test_the_same_release_is_fine(on_ranks: Any, imported: list[dict[str, str]]) -> None:
    assert meet(on_ranks, *imported) == [None] * len(imported)


def test_another_release_is_named_on_every_rank(on_ranks: Any) -> None:
    found = meet(on_ranks, {}, {"jax": "0.10.1"}, {"jax": "0.9.2"})
    for error in found:
        assert isinstance(error, UserError)
        assert "releases of jax: rank 1 has 0.10.1, and rank 2 has 0.9.2" in str(error)

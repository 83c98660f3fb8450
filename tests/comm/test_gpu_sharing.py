"""Which versions of NCCL serve ranks that share a GPU, and what they are told."""

from __future__ import annotations

import pytest

from farandole.comm import gpu_sharing
from farandole.comm.gpu_sharing import nccl_serves, nccl_text


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...] | None]:
    """The version that is loaded; there is no GPU here."""
    found: list[tuple[int, ...] | None] = [None]
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: found[0])
    return found


def test_a_machine_without_gpus() -> None:
    environ: dict[str, str] = {}
    assert not nccl_serves(1, environ)
    assert nccl_text() == "none"
    assert not environ


def test_one_rank_a_gpu_needs_no_variables(loaded: list[tuple[int, ...] | None]) -> None:
    loaded[0], environ = (2, 28, 9), dict[str, str]()
    assert nccl_serves(1, environ)
    assert not environ


def test_an_older_version_does_not_serve_several(loaded: list[tuple[int, ...] | None]) -> None:
    loaded[0], environ = (2, 28, 9), dict[str, str]()
    assert not nccl_serves(2, environ)
    assert not environ
    assert nccl_text() == "2.28.9"


def test_a_newer_one_is_told_to(loaded: list[tuple[int, ...] | None]) -> None:
    loaded[0], environ = (2, 31, 2), dict[str, str]()
    assert nccl_serves(2, environ)
    assert environ == {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}


def test_what_the_user_has_set_stays(loaded: list[tuple[int, ...] | None]) -> None:
    loaded[0], environ = (2, 31, 2), {"NCCL_MAX_CTAS": "8"}
    assert nccl_serves(4, environ)
    assert environ["NCCL_MAX_CTAS"] == "8"
    assert not nccl_serves(4, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})


@pytest.mark.parametrize(("number", "version"), [(22809, (2, 28, 9)), (2804, (2, 8, 4))])
def test_how_versions_are_counted(number: int, version: tuple[int, ...]) -> None:
    assert gpu_sharing._version(number) == version

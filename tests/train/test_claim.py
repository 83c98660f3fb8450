"""Runs that start in the same second have folders of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import farandole as fd
from farandole.train.claim import claim
from farandole.train.run_parts import naming


def test_many_at_once_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: claim(tmp_path / "runs", "digits"), range(40)))
    names = {f"digits-{number}" for number in range(2, 41)} | {"digits"}
    assert {claimed.name for claimed in claims} == names
    assert {path.name for path in (tmp_path / "runs").iterdir()} == names


def test_what_was_never_used_goes_away(tmp_path: Path) -> None:
    first, second = claim(tmp_path / "runs", "a"), claim(tmp_path / "runs", "a")
    (tmp_path / "runs" / "a-2" / "metrics.jsonl").touch()
    second.release()
    first.release()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-2"]
    alone = claim(tmp_path / "others", "a")
    alone.release()
    assert not (tmp_path / "others").exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    claim(tmp_path / "runs", "a").release()
    assert (tmp_path / "runs").exists()


def test_a_place_where_nothing_can_be_made_is_no_error_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert claim(tmp_path / "file", "a").name == "a"
    assert claim(tmp_path / "file" / "runs", "a").name == "a"


def test_two_runs_of_one_second_log_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(naming, "default_name", lambda script: "digits-20260131-235959")
    with fd.init() as first, fd.init() as second:
        first.log(loss=1.0)
        second.log(loss=2.0)
    assert first.name == "digits-20260131-235959"
    assert second.name == "digits-20260131-235959-2"
    assert all((run.folder / "metrics.jsonl").exists() for run in (first, second))


def test_a_run_with_a_name_goes_on_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with fd.init(name="mine") as run:
            run.log(loss=1.0)
            assert run.folder == Path("runs/mine")

"""`on_error`: a sample that cannot be decoded is named, or left out, counted and reported."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import DataError, UserError
from farandole.testing import run_world
from farandole.train import Run

BAD = {3, 17}


def number_of(sample: Any) -> int:
    return int(sample["n"])


def write_shards(folder: Path, bad: set[int] = BAD) -> str:
    for shard in range(2):
        lines = [
            "{" if n in bad else json.dumps({"n": n}) for n in range(shard * 10, shard * 10 + 10)
        ]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "{0,1}.jsonl")


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples_are_left_out_and_counted(tmp_path: Path, workers: int) -> None:
    dataset = fd.data.shards(write_shards(tmp_path), transform=number_of, on_error="skip")

    def body(run: Run) -> tuple[list[int], float]:
        loader = run.loader(dataset, batch_size=5, shuffle=False, num_workers=workers)
        seen, own = [], 0.0
        for batch in loader:
            seen += batch.tolist()
            assert loader.last_batch is not None
            own += loader.last_batch.own_samples
            assert loader.last_batch.skipped == 5 - len(batch)
        run.log(loss=1.0)
        return seen, own

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run_world(2, body, folder=tmp_path / "runs")
    first, second = sorted(str(each.message) for each in said)
    assert re.match(r"skipped: sample 3 of .*0\.jsonl \(sample 3 of the dataset\): the line", first)
    assert re.match(r"skipped: sample 7 of .*1\.jsonl \(sample 17 of the dataset\)", second)
    assert sorted(found[0][0] + found[1][0]) == sorted(set(range(20)) - BAD)
    assert found[0][1] + found[1][1] == 18
    (log,) = (tmp_path / "runs").rglob("metrics.jsonl")
    notes = [json.loads(line).get("sync") for line in log.read_text().splitlines()]
    assert {"skipped_samples": 2} in notes


@pytest.mark.parametrize("workers", [0, 1])
def test_by_default_a_bad_sample_is_an_error_that_names_it(tmp_path: Path, workers: int) -> None:
    dataset = fd.data.shards(write_shards(tmp_path), transform=number_of)

    def body(run: Run) -> None:
        list(run.loader(dataset, batch_size=5, num_workers=workers))

    with pytest.raises(DataError, match=r"sample (3 of .*0|7 of .*1)\.jsonl .*cannot be decoded"):
        run_world(1, body, folder=tmp_path / "runs")


def test_what_cannot_be_skipped(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, bad=set(range(10)))
    dataset = fd.data.shards(pattern, on_error="skip")

    def body(run: Run) -> None:
        list(run.loader(dataset, batch_size=5, shuffle=False))

    with pytest.raises(DataError, match=r"none of the 5 samples of a batch.*sample 0 of .*; …"):
        run_world(1, body, folder=tmp_path / "runs")
    dataset = fd.data.shards(pattern, on_error="skip")  # nothing of it is read yet
    (tmp_path / "1.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"1\.jsonl has changed since the job began"):
        dataset[15]
    with pytest.raises(UserError, match='on_error=\'ignore\': it is "raise" or "skip"'):
        fd.data.shards(pattern, on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_batch_that_cannot_be_put_together_names_the_odd_sample(
    tmp_path: Path, on_error: Any
) -> None:
    def image(sample: Any) -> Any:
        return {"x": torch.zeros(3, 4 if sample["n"] == 14 else 2)}

    dataset = fd.data.shards(write_shards(tmp_path, set()), transform=image, on_error=on_error)

    def body(run: Run) -> None:
        list(run.loader(dataset, batch_size=5))

    odd = r"sample 4 of \S*1\.jsonl \(sample 14 of the dataset\) is \['x'\] torch.float32 of .*3, 4"
    with pytest.raises(DataError, match=rf"a batch of 5 samples cannot be put together: .*{odd}"):
        run_world(1, body, folder=tmp_path / "runs")


def as_given(samples: list[Any]) -> list[Any]:
    return samples


def test_a_collate_fn_gets_a_plain_list_and_may_return_it(tmp_path: Path) -> None:
    dataset = fd.data.shards(write_shards(tmp_path, set()), transform=number_of)

    def body(run: Run) -> list[Any]:
        return list(run.loader(dataset, batch_size=10, collate_fn=as_given, num_workers=1))

    (found,) = run_world(1, body, folder=tmp_path / "runs")
    assert {type(batch) for batch in found} == {list}
    assert sorted(found[0] + found[1]) == list(range(20))

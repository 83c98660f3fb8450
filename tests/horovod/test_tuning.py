"""Autotuning: every setting gets its turns, and the one by which most gets through is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.errors import UserError
from farandole.horovod.engine.tuning import CHOICES, FusionTuner, Tuned
from farandole.horovod.session import current
from farandole.horovod.settings import Settings
from farandole.testing.horovod import run_horovod

BEST = CHOICES[5]


def tuned_by(tuner: FusionTuner) -> list[Tuned]:
    """What it says in a training whose speed depends on the setting."""
    said: list[Tuned] = []
    now, using = 0.0, None
    for _ in range(100_000):
        now += 0.5 if using == BEST else 1.0
        found = tuner.saw(1000, now)
        if found is not None:
            said.append(found)
            using = found
        if tuner.chosen is not None:
            return said
    raise AssertionError("it never comes to an end")


def test_each_has_three_turns_and_the_best_stays() -> None:
    tuner = FusionTuner(None, turn_seconds=10.0)
    said = tuned_by(tuner)
    assert said == [*CHOICES * 3, BEST]
    assert tuner.chosen == BEST
    assert tuner.saw(10**9, 10**9) is None  # it has chosen


def test_a_pause_at_the_start_of_a_turn_does_not_count() -> None:
    """The clock of a turn begins with the first thing that is done under the new setting."""
    tuner = FusionTuner(None, turn_seconds=1.0)
    assert tuner.saw(0, 0.0) is None
    assert tuner.saw(0, 1.0) == CHOICES[0]
    assert tuner.saw(500, 100.0) is None
    assert tuner.saw(500, 102.0) == CHOICES[1]
    assert tuner._scores[CHOICES[0]] == [250.0]


def test_what_was_tried_is_written_down(tmp_path: Path) -> None:
    log = tmp_path / "tuning.csv"
    tuned_by(FusionTuner(log, turn_seconds=10.0))
    head, *lines, last = log.read_text().splitlines()
    assert head == "fusion_mb,begin_mb,mb_per_second"
    assert len(lines) == 3 * len(CHOICES)
    assert last == f"{BEST.fusion_bytes >> 20},{BEST.begin_bytes >> 20},chosen"
    with pytest.raises(UserError, match="cannot be written"):
        FusionTuner(tmp_path)


def test_all_ranks_use_what_rank_0_has_chosen(tmp_path: Path) -> None:
    def body() -> tuple[int, int]:
        engine = current().engine(hvd.global_process_set)
        if engine._tuner is not None:
            engine._tuner._turn_seconds = 0.0
        for turn in range(100):
            handles = [hvd.allreduce_async(torch.ones(3), name=f"{turn}.{i}") for i in range(2)]
            for handle in handles:
                assert hvd.synchronize(handle).tolist() == [1.0, 1.0, 1.0]
        hvd.barrier()
        return engine._rounds._table.fusion_bytes, engine._rounds.begin_bytes

    log = tmp_path / "log.csv"
    found = run_horovod(3, body, settings=Settings(autotune=True, autotune_log=log))
    assert len(set(found)) == 1
    fusion, begin, last = log.read_text().splitlines()[-1].split(",")
    assert last == "chosen"
    assert found[0] == (int(fusion) << 20, int(begin) << 20)

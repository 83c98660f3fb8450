"""All-reduce between real processes: two ranks, once, and what both found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "allreduce_facts.py"

Facts = list[dict[str, Any]]


def test_two_real_processes(
    sandbox: Sandbox, two_ranks: Any, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One test, because starting processes costs more than all that they do."""
    for done in sandbox.by_hand(two_ranks, SCRIPT, tmp_path):
        assert done.returncode == 0, done.stdout + done.stderr
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for check in (
        the_same_bits_as_ddp_after_twenty_steps,
        waiting_and_bytes_are_measured,
        ranks_in_step_and_out_of_step,
        models_that_differ_are_named,
        optimizer_state_comes_from_rank_0,
        mixed_precision_works,
        uneven_shares_and_shared_batchnorm_are_exact,
        epochs_with_a_short_last_step_are_those_of_one_worker,
        a_sampler_is_drawn_by_rank_0_alone,
        numbers_and_checkpoints_agree,
    ):
        with subtests.test(check.__name__):
            check(facts)


def the_same_bits_as_ddp_after_twenty_steps(facts: Facts) -> None:
    for found in facts:
        assert found["same_bits"] == {"None": True, "25.0": True, "0.001": True}
        assert found["moved"]


def waiting_and_bytes_are_measured(facts: Facts) -> None:
    for found in facts:
        assert found["waited_seconds"] > 0
        # Rank 0's DDP also tells the others how it has arranged its buckets.
        assert 0 <= found["bytes_sent"] - found["bytes_expected"] < 200
        assert found["bytes_expected"] > 1000


def ranks_in_step_and_out_of_step(facts: Facts) -> None:
    for found in facts:
        assert found["in_step_before"] == "all ranks hold the same bytes"
        assert found["in_step_after"] == [False, "differs from rank 0: 3.weight (ranks [1])"]


def models_that_differ_are_named(facts: Facts) -> None:
    for found in facts:
        assert "'1.weight' is (2, 4) float32 on rank 0" in found["mismatch"]
        assert "(3, 4) float32 on rank 1" in found["mismatch"]


def optimizer_state_comes_from_rank_0(facts: Facts) -> None:
    first, second = (found["optimizer"] for found in facts)
    assert first == second
    assert (first["lr"], first["step"], first["betas"]) == (0.1, 3.0, [0.8, 0.9])
    assert all(value != 0 for row in first["exp_avg"] for value in row)


def mixed_precision_works(facts: Facts) -> None:
    for found in facts:
        assert found["autocast"] == {
            "output": "torch.bfloat16",
            "weights": "torch.float32",
            "learns": True,
            "in_step": True,
        }


def uneven_shares_and_shared_batchnorm_are_exact(facts: Facts) -> None:
    assert [found["share"] for found in facts] == [5, 6]
    for found in facts:
        assert found["largest_error"] < 1e-12
        assert found["running_mean_error"] < 1e-12


def epochs_with_a_short_last_step_are_those_of_one_worker(facts: Facts) -> None:
    for found in facts:
        assert found["error_of_epochs"] < 1e-12


def a_sampler_is_drawn_by_rank_0_alone(facts: Facts) -> None:
    shares = [found["drawn"] for found in facts]
    assert [len(share) for share in shares] == [2, 2]
    generator = torch.Generator().manual_seed(0)
    order = [index % 3 for index in WeightedRandomSampler([1.0] * 11, 8, generator=generator)]
    assert [*shares[0][0], *shares[1][0], *shares[0][1], *shares[1][1]] == order


def numbers_and_checkpoints_agree(facts: Facts) -> None:
    for found in facts:
        assert found["mean"] == [1.0, 0.5]
        assert found["sum"] == [2.0, 2**61 + 1]
        assert found["restored"] == 2.0

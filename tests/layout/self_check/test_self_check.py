"""A layout that does not compute what the plain model computes does not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from farandole.layout.self_check.draws import ExpectedDraws, UnknownDrawError
from farandole.layout.self_check.layers import RankSums, first_difference
from farandole.layout.self_check.passed import PassedCheck
from farandole.layout.self_check.swapped import swapped

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[1] / "scripts" / "self_check_facts.py"

EXACT = {  # what trains, as it does in one process
    *(f"nothing {layout}" for layout in ("stages", "tiles", "gems")),
    "moving_average tiles",
    "attribute tiles",
    *(
        f"{case} {layout}"
        for case in (
            *("named_axis", "deviation", "largest", "picked", "weight_view"),
            "custom_function",
        )
        for layout in ("stages", "tiles", "gems")
    ),
}
REFUSED_WHILE_CUT = {"hook stages", "hook gems", "attribute stages", "attribute gems"}
REFUSED_BY_MICRO_BATCHES = {"moving_average stages", "moving_average gems"}
FIRST_LAYER = {
    "by_type tiles": "second",
}


def test_two_real_processes(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.farandole("run", "-n", "2", SCRIPT, tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert found == other, "all ranks come to the same"
    for case, (kind, said) in found["cases"].items():
        if case in EXACT:
            assert kind == "trained", (case, said)
        elif case in REFUSED_WHILE_CUT:
            assert kind == "UserError", (case, said)
        elif case in REFUSED_BY_MICRO_BATCHES:
            assert kind == "InexactError", (case, said)
            assert "forward changes 'average', and a step runs it" in said
            assert "check=False" in said
        elif case == "hook tiles":
            assert kind == "StageError", (case, said)
            assert "register_hook is not possible" in said
        else:
            assert kind == "InexactError", (case, said)
            assert "does not compute what the plain model computes" in said
            assert "check=False" in said
    for case, layer in FIRST_LAYER.items():
        assert f"The first layer whose output differs is {layer!r}" in found["cases"][case][1]
    assert found["undisturbed"] == {"stages": True, "tiles": True, "gems": True}
    assert found["unchecked"][0] == "trained", "check=False leaves it out"
    assert done.stdout.count("checked: the layout computes what the plain model does") >= len(EXACT)
    assert "the layout was checked against the plain model before" in done.stdout


class Remembering(nn.Module):
    """Changes what it holds in every way that a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("sum", torch.zeros(2))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count = self.count + 1
        self.sum.add_(x.detach().sum(0))
        self.new = x
        result: torch.Tensor = self.layer(x)
        return result


def test_a_trial_leaves_nothing_behind() -> None:
    module = Remembering()
    weight, count = module.layer.weight, module.count
    memory = weight.data_ptr()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with swapped(module, torch.float64):
        assert module.layer.weight is weight, "whoever holds on to a tensor sees the trial's"
        assert weight.dtype is torch.float64
        module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        assert module.calls == 1
    assert module.layer.weight is weight
    assert module.count is count
    assert weight.data_ptr() == memory
    assert weight.grad is None
    assert (module.calls, module.seen, hasattr(module, "new")) == (0, [], False)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert value.dtype is torch.float32


def test_expected_draws() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with ExpectedDraws():
        assert torch.equal(torch.nn.functional.dropout(x, 0.4), x)
        assert torch.equal(torch.nn.functional.dropout2d(x[None, None], 0.4)[0, 0], x)
        assert torch.equal(torch.rand(3), torch.full((3,), 0.5))
        assert torch.equal(torch.randn_like(x), torch.zeros_like(x))
        assert torch.equal(torch.empty(2).uniform_(-1, 3), torch.ones(2))
        assert torch.equal(torch.empty(2).normal_(2.0, 5.0), torch.full((2,), 2.0))
        assert torch.equal(torch.randint(0, 5, (2,)), torch.full((2,), 2))
        assert torch.equal(torch.bernoulli(torch.full((2,), 0.3)), torch.full((2,), 0.3))
        query = torch.randn(1, 2, 3, 4) + x.sum()
        attended = nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        again = nn.functional.scaled_dot_product_attention(query, query, query)
        torch.testing.assert_close(attended, again)
        with pytest.raises(UnknownDrawError, match="multinomial"):
            torch.multinomial(torch.ones(3), 1)


def test_the_first_layer_is_found_among_pieces_and_copies() -> None:
    plain = {"a": [1.0, 10.0], "b": [2.0, 8.0], "c": [1.0, 6.0], "d": [1.0, 1.0]}
    halves = [
        RankSums(0, {"a": [1.0, 4.0], "b": [2.0, 4.0], "c": [1.0, 6.0]}),
        RankSums(1, {"a": [1.0, 6.0], "b": [4.0, 8.0], "c": [1.0, 6.0]}),
    ]
    assert first_difference(plain, halves, 1e-6) is None, "pieces, runs in turn, copies, unseen"
    halves[1].seen["b"] = [4.0, 9.0]
    assert first_difference(plain, halves, 1e-6) == "b"


def test_what_was_passed_is_known_by_all_that_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = torch.device("cpu")

    def passed(model: nn.Module, layout: str = "tiles=2x1", rows: int = 4) -> Any:
        return PassedCheck(model, layout, cpu, torch.zeros(rows, 3))

    assert passed(nn.Linear(3, 3)).when() == ""
    passed(nn.Linear(3, 3)).note()
    assert passed(nn.Linear(3, 3)).when()
    assert not passed(nn.Linear(3, 4)).when()
    assert not passed(nn.Linear(3, 3), "stages=2").when()
    assert not passed(nn.Linear(3, 3), rows=5).when()
    marked = nn.Linear(3, 3)
    marked.mode = "other"
    assert not passed(marked).when()

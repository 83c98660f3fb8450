"""What a newcomer forgets, and what the run says then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from farandole.errors import FarandoleError, UserError
from farandole.testing import run_world
from farandole.train.run import Run
from farandole.train.settings import check_name

DATA = TensorDataset(torch.randn(12, 2), torch.randn(12, 1))


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_training_and_saving_without_distribute_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(run: Run) -> None:
        for _ in run.loader(DATA, batch_size=2):
            pass
        run.save()

    run_world(2, body, folder=tmp_path / "two")
    said = capsys.readouterr().out
    assert said.count("each rank trains one of its own") == 1
    assert "this checkpoint holds no model" in said
    run_world(1, body, folder=tmp_path / "one")
    assert "each rank" not in capsys.readouterr().out, "alone there is nothing to distribute"


def test_training_without_the_loader_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(run: Run) -> None:
        run.distribute(*model_and_optimizer())
        run.log(loss=1.0)

    run_world(2, body, folder=tmp_path)
    assert "no batch came from run.loader" in capsys.readouterr().out


def test_another_runs_checkpoints_are_never_removed(tmp_path: Path) -> None:
    def save(run: Run) -> list[str]:
        run.distribute(*model_and_optimizer())
        return [run.save(keep=1).name for _ in range(2)]

    def resume(run: Run) -> list[str]:
        run.distribute(*model_and_optimizer())
        run.load()
        return [run.save(keep=1).name for _ in range(2)]

    folder = tmp_path / "world" / "checkpoints"
    assert run_world(1, save, folder=tmp_path) == [["000000", "000001"]]
    assert [p.name for p in folder.iterdir()] == ["000001"]
    with pytest.warns(UserWarning, match="of an earlier run, which this run did not load"):
        run_world(1, save, folder=tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["000001", "000003"]
    run_world(1, resume, folder=tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["000005"], "what was loaded is its own"


def test_a_resumed_run_says_from_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(run: Run) -> None:
        run.distribute(*model_and_optimizer())
        run.load()
        for _ in run.epochs(2):
            for _ in run.loader(DATA, batch_size=2):
                pass
            run.save()

    run_world(1, body, folder=tmp_path)
    capsys.readouterr()
    run_world(1, body, folder=tmp_path)
    said = capsys.readouterr().out
    assert "going on from" in said
    assert "000001, at epoch 2" in said
    assert "all 2 epochs are done already" in said


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body(run: Run) -> None:
        run.distribute(*model_and_optimizer())

    with pytest.raises(FarandoleError, match="cannot write metrics"):
        run_world(1, body, folder=tmp_path / "file" / "runs")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ""])
def test_a_name_that_leads_out_of_the_runs(name: str) -> None:
    with pytest.raises(UserError, match="leads out"):
        check_name(name)


def test_print_takes_several_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_world(2, lambda run: run.print("rank", run.rank), folder=tmp_path)
    assert capsys.readouterr().out == "rank 0\n"

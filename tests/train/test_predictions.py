"""`run.predictions`: the parts of all ranks in one file, only if they are probabilities."""

from __future__ import annotations

from typing import Any

import torch

from farandole.train.choosing.predictions import read_predictions


def test_the_parts_of_all_ranks_are_in_one_file(sandbox: Any) -> None:
    sandbox.script(
        "train.py",
        """
import torch, farandole as fd
run = fd.init()
mine = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])[: 1 + 2 * run.rank]
run.predictions(mine, torch.full((len(mine),), run.rank))
for probabilities, labels in (
    (mine * 2, torch.zeros(len(mine), dtype=torch.long)),
    (mine, torch.zeros(len(mine))),
    (mine, torch.tensor([0])),
    (mine, torch.full((len(mine),), 2)),
):
    try:
        run.predictions(probabilities, labels)
    except fd.UserError as error:
        run.print(error)
""",
    )
    done = sandbox.farandole("run", "-n", "2", "--name", "r", "train.py")
    assert done.returncode == 0, done.stderr
    found = read_predictions(sandbox.folder / "runs/r")
    assert found is not None
    probabilities, labels = found
    assert probabilities.tolist() == [[0.25, 0.75], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]
    assert labels.tolist() == [0, 1, 1, 1]
    assert labels.dtype == torch.int64
    assert "rank 0: each row must be probabilities" in done.stdout
    assert "rank 0: labels are the numbers of classes, and these are no integers" in done.stdout
    assert "rank 1: give a row of probabilities and a label" in done.stdout
    assert "labels go from 2 to 2, and there are 2 classes" in done.stdout
    assert read_predictions(sandbox.folder / "runs") is None

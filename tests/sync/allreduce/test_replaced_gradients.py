"""A script that puts other memory under a gradient (`grad.data = …`) still gets averages.

After a pass the parameters' gradients are views of the buckets. Such a script moves a view away.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from farandole.errors import DivergedError
from farandole.testing import run_world
from farandole.train import Run


@pytest.mark.parametrize("set_to_none", [True, False])
def test_averages_after_grad_data_was_set(tmp_path: Path, set_to_none: bool) -> None:
    def body(run: Run) -> list[float]:
        model = nn.Linear(3, 2)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.0))  # type: ignore[assignment]
        seen = []
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.full((1, 3), run.rank + 10.0 * step)).sum().backward()
            gradient = model.weight.grad
            assert gradient is not None
            seen.append(gradient[1, 2].item())
            gradient.data = gradient.data * 2
            optimizer.step()
        return seen

    expected = [0.5, 10.5, 20.5, 30.5, 40.5]
    assert run_world(2, body, folder=tmp_path) == [expected, expected]


def test_a_nan_that_was_put_there(tmp_path: Path) -> None:
    def body(run: Run) -> bool:
        model = nn.Linear(3, 2)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))  # type: ignore[assignment]
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            if step == 3:
                gradient = model.weight.grad
                assert gradient is not None
                gradient.data = gradient.data * torch.nan
            try:
                optimizer.step()
            except DivergedError:
                return step == 3 and bool(model.weight.isfinite().all())
        return False

    assert run_world(2, body, folder=tmp_path) == [True, True]


def test_a_model_that_changes_its_dtype_while_it_has_gradients(tmp_path: Path) -> None:
    def body(run: Run) -> list[float]:
        model = nn.Linear(1, 1)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.0))  # type: ignore[assignment]
        data = TensorDataset(torch.arange(4.0).view(4, 1))
        seen = []
        for epoch in range(2):
            if epoch:
                model.double()  # the gradients of the last step, too
            for (x,) in run.loader(data, batch_size=1, shuffle=False):
                optimizer.zero_grad()
                model(x.to(model.weight.dtype)).sum().backward()
                assert model.weight.grad is not None
                seen.append(model.weight.grad.item())
                optimizer.step()
        return seen

    assert run_world(2, body, folder=tmp_path) == [[0.5, 2.5] * 2] * 2

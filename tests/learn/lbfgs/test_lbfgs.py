"""LBFGS finds what torch's and SciPy's find, whoever computes, also if workers are killed."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import optimize
from torch import nn

from farandole.errors import CheckpointError, DivergedError, UserError
from farandole.learn import LBFGS
from farandole.learn.pools.here import Here
from farandole.learn.pools.processes import Processes
from farandole.learn.pools.ranks import Ranks
from farandole.testing import run_world
from tests.support.signalled import Signalled

ROWS, COLUMNS, CLASSES = 203, 6, 3
generator = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
Y = (X @ torch.randn(COLUMNS, CLASSES, generator=generator, dtype=torch.float64)).argmax(1)
DECAY = 1e-2


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(COLUMNS, CLASSES).double()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(COLUMNS, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def objective(model: nn.Module) -> torch.Tensor:
    squares = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(X), Y) + 0.5 * DECAY * squares


def value_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(objective(model))


def fit(model: nn.Module | None = None, **options: Any) -> LBFGS:
    chosen = {"weight_decay": DECAY, "tolerance": 1e-10, "pool": Here(1), "pieces": 5} | options
    return LBFGS(F.cross_entropy, model or linear(), **chosen).fit(X, Y)


def with_torch(model: nn.Module) -> nn.Module:
    theirs = torch.optim.LBFGS(
        model.parameters(),
        max_iter=100,
        tolerance_grad=1e-11,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        theirs.zero_grad()
        loss = objective(model)
        loss.backward()
        return loss

    theirs.step(closure)
    return model


def with_scipy(model: nn.Module) -> torch.Tensor:
    def value(vector: Any) -> tuple[float, Any]:
        nn.utils.vector_to_parameters(torch.tensor(vector), model.parameters())
        model.zero_grad()
        loss = objective(model)
        loss.backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        return float(loss.detach()), gradient.numpy()

    options = {"gtol": 1e-11, "ftol": 0.0, "maxiter": 500}
    start = flat(model).numpy()
    found = optimize.minimize(value, start, jac=True, method="L-BFGS-B", options=options)
    return torch.tensor(found.x)


def test_it_agrees_with_torch_and_scipy() -> None:
    ours = fit()
    assert ours.converged_
    assert torch.allclose(flat(ours.model), flat(with_torch(linear())), rtol=0, atol=1e-8)
    assert torch.allclose(flat(ours.model), with_scipy(linear()), rtol=0, atol=1e-8)
    assert ours.loss_ == pytest.approx(value_of(ours.model), rel=1e-12)
    assert all(b <= a + 1e-14 for a, b in zip(ours.losses_, ours.losses_[1:], strict=False))
    assert ours.n_evaluations_ == len(ours.report_.passes)


def test_a_network_gets_as_low_as_with_torch() -> None:
    ours = fit(network(), max_iter=200, tolerance=1e-4)
    theirs = with_torch(network())
    assert ours.converged_
    assert ours.loss_ <= value_of(theirs) + 1e-4


def test_a_function_that_is_hard_for_gradients() -> None:
    """Rosenbrock's, as the loss of a model without data."""

    class Valley(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.at
            return x * ((1 - a) ** 2 + 100 * (b - a * a) ** 2)

    ones = torch.ones(3, 1, dtype=torch.float64)
    model = Valley()
    found = LBFGS(torch.mean, model, tolerance=1e-12, pool=Here(1)).fit(ones)
    assert found.n_iter_ < 60
    assert torch.allclose(model.at, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:not converged after 3")
def test_workers_that_are_killed_or_stopped_change_nothing(tmp_path: Path) -> None:
    expected = fit(linear(), max_iter=3, tolerance=0)
    signals = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
    model = Signalled(linear(), tmp_path, signals)
    found = fit(model, max_iter=3, tolerance=0, pool=Processes(3))
    assert torch.equal(flat(found.model), flat(expected.model))
    assert len(list(tmp_path.iterdir())) == len(signals)
    counts = [each.counts for each in found.report_.passes]
    assert sum(each.losses for each in counts) == 2
    assert sum(each.backups for each in counts) >= 1


@pytest.mark.parametrize("pool", [None, Here(3)], ids=["cores", "threads"])
def test_the_same_bits_from_threads(pool: Any) -> None:
    assert torch.equal(flat(fit(pool=pool).model), flat(fit().model))


def test_the_same_bits_on_ranks(tmp_path: Path) -> None:
    models = [linear(), linear()]  # not in the ranks: these are threads, and share the seed
    run_world(2, lambda run: fit(models[run.rank], pool=Ranks(run.group)), folder=tmp_path)
    assert all(torch.equal(flat(model), flat(fit().model)) for model in models)


def test_ranks_that_begin_with_different_models(tmp_path: Path) -> None:
    models = [linear(), linear()]
    with torch.no_grad():
        next(models[1].parameters()).add_(1)
    with pytest.raises(UserError, match=r"rank 1 begins pass 1 over .* with another state"):
        run_world(2, lambda run: fit(models[run.rank], pool=Ranks(run.group)), folder=tmp_path)


def test_a_fit_that_was_interrupted_goes_on_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lbfgs.safetensors"
    fit_network = partial(fit, history=3, tolerance=1e-3, checkpoint=path)
    whole = fit(network(), history=3, tolerance=1e-3)
    with pytest.warns(UserWarning, match="not converged after 5 iterations"):
        fit_network(network(), max_iter=5)
    resumed = fit_network(network())
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert (resumed.losses_, resumed.n_iter_) == (whole.losses_, whole.n_iter_)
    assert len(resumed.report_.passes) < len(whole.report_.passes)
    with pytest.raises(UserError, match="has history=3, not 4"):
        fit_network(network(), history=4)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is damaged"):
        fit_network(network())


def test_an_interruption_leaves_the_parameters_of_the_last_iteration() -> None:
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    model = linear()
    before = float(F.cross_entropy(model(X), Y).detach())
    with pytest.raises(KeyboardInterrupt):
        LBFGS(loss, model, pool=Here(1), pieces=5).fit(X, Y)
    with torch.no_grad():
        assert float(F.cross_entropy(model(X), Y)) < before


class Tied(nn.Module):
    """Tokens in, tokens out, by one matrix under two names; a part of it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.middle.bias.requires_grad_(False)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.tanh(self.middle(self.embed(x))) * self.scale)
        return found.flatten(0, 1)


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.flatten())


def test_integers_tied_and_frozen_parameters_and_buffers() -> None:
    torch.manual_seed(2)
    tokens = torch.randint(5, (40, 3))
    model = Tied()
    frozen = model.middle.bias.clone()
    with torch.no_grad():
        before = float(mean_loss(model(tokens), tokens))
    found = LBFGS(mean_loss, model, pool=Here(2), weight_decay=1e-3, tolerance=1e-3).fit(
        tokens, tokens
    )
    assert found.loss_ < before / 2
    assert model.out.weight is model.embed.weight
    assert torch.equal(model.middle.bias, frozen)
    assert model.middle.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("loss", "model"),
    [
        (lambda output, y: F.cross_entropy(output, y, reduction="sum"), linear),
        (F.cross_entropy, lambda: nn.Sequential(nn.BatchNorm1d(COLUMNS), linear()).double()),
        (F.cross_entropy, lambda: nn.Sequential(nn.Dropout(), linear())),
    ],
    ids=["a sum", "BatchNorm", "dropout"],
)
def test_what_is_no_mean_over_rows_is_refused(loss: Any, model: Any) -> None:
    with pytest.raises(UserError, match="not a mean over rows"):
        LBFGS(loss, model()).fit(X, Y)


def test_bad_input() -> None:
    model = linear()
    for options in ({"history": 0}, {"pieces": 0}, {"weight_decay": -1.0}, {"max_iter": -1}):
        with pytest.raises(UserError, match=f"{next(iter(options))}="):
            LBFGS(F.cross_entropy, model, **options)
    optimizer = LBFGS(F.cross_entropy, model)
    with pytest.raises(UserError, match="X has 203 rows, and y has 202"):
        optimizer.fit(X, Y[1:])
    with pytest.raises(UserError, match="no rows"):
        optimizer.fit(X[:0], Y[:0])
    spoilt = X.clone()
    spoilt[150, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN: row 150, column 2"):
        optimizer.fit(spoilt, Y)
    with pytest.raises(UserError, match="must be one number"):
        LBFGS(lambda output, y: output, model).fit(X, Y)
    with pytest.raises(UserError, match="no parameters that require gradients"):
        LBFGS(F.cross_entropy, linear().requires_grad_(False))
    with torch.no_grad():
        model.weight.fill_(torch.inf)
    with pytest.raises(DivergedError, match="the loss at the first parameters"):
        LBFGS(F.cross_entropy, model).fit(X, Y)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fit(verbose=True)
    shown = capsys.readouterr().err
    assert "LBFGS: pass " in shown
    assert "loss " in shown
    report = fit().report_
    assert "GradientSum" in str(report)
    assert str(report).endswith("bytes")
    assert report.seconds > 0

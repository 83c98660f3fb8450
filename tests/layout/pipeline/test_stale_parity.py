"""Schemes that use old weights compute what their formulas say.

The references here are serial and know nothing of schedules, ranks or stashes: they keep all
versions of all weights, and take for each minibatch those that the formula names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

from farandole import Layout
from farandole.train import Run
from farandole.train.trainer import Trainer
from tests.layout.models import (
    Batch,
    MakeOptimizer,
    adamw,
    assert_close,
    assert_weights,
    drawn,
    in_stages,
    sgd,
    task,
    tensors_of,
)

Weights = dict[str, Tensor]
Passes = Sequence[Sequence[Batch]]


class History:
    """A stage: all versions of its weights, of which the last is the model's own."""

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.module = module
        self.optimizer = make_optimizer(module.parameters())
        self.versions: list[Weights] = []
        self.gradients: list[Weights] = []  # since the last update
        self.restart()

    def restart(self) -> None:
        """The newest version is called 0 from here on."""
        self.versions = [self._copy()]

    def at(self, version: int) -> Weights:
        return {
            name: value.clone().requires_grad_() for name, value in self.versions[version].items()
        }

    def update(self) -> None:
        """By the mean of the gradients that have come since the last one."""
        for name, weight in self.module.named_parameters():
            weight.grad = torch.stack([each[name] for each in self.gradients]).mean(0)
        self.optimizer.step()
        self.gradients.clear()
        self.versions.append(self._copy())

    def _copy(self) -> Weights:
        return {name: w.detach().clone() for name, w in self.module.named_parameters()}


def pipedream(
    stages: Sequence[nn.Module],
    passes: Passes,
    make_optimizer: MakeOptimizer,
    replicas: Sequence[int] = (),
    vertical: bool = False,
) -> list[float]:
    """Trains `stages`; returns the loss of every minibatch.

    Minibatch i uses, on stage s of p, the weights after max(0, i − (p − 1 − s)) updates; with
    vertical sync, on all stages, those after max(0, i − (p − 1)). A stage of r ranks, with a ranks
    after it, updates once for every r minibatches, by the mean of their gradients, and is
    ⌈a / r⌉ such rounds behind.
    """
    counts = list(replicas) or [1] * len(stages)
    behind = [math.ceil(sum(counts[s + 1 :]) / counts[s]) for s in range(len(stages))]
    if vertical:
        behind = [len(stages) - 1] * len(stages)
    histories = [History(stage, make_optimizer) for stage in stages]
    losses = []
    for batches in passes:
        for i, (x, y) in enumerate(batches):
            used = [
                history.at(max(0, i // count - late))
                for history, count, late in zip(histories, counts, behind, strict=True)
            ]
            value = x
            for history, weights in zip(histories, used, strict=True):
                value = functional_call(history.module, weights, (value,))
            loss = F.mse_loss(value, y)
            loss.backward()
            losses.append(loss.item())
            for history, weights, count in zip(histories, used, counts, strict=True):
                history.gradients.append({name: w.grad for name, w in weights.items()})
                if (i + 1) % count == 0 or i + 1 == len(batches):
                    history.update()
        for history in histories:
            history.restart()
    return losses


def pipedream_without_stash(
    stages: Sequence[nn.Sequential], passes: Passes, make_optimizer: MakeOptimizer
) -> list[float]:
    """Forward as PipeDream; backward with the weights after i updates.

    By hand, for layers h = tanh(W·h + b), since autograd knows only gradients of functions: the
    activations are those of the old weights, and what goes back goes back through the new ones.
    """
    histories = [History(stage, make_optimizer) for stage in stages]
    losses = []
    for batches in passes:
        for i, (x, y) in enumerate(batches):
            values, layers = [x], []
            for s, history in enumerate(histories):
                old = history.versions[max(0, i - (len(stages) - 1 - s))]
                names = list(old)
                for weight, bias in zip(names[::2], names[1::2], strict=True):
                    layers.append((history, weight, bias))
                    values.append((values[-1] @ old[weight].T + old[bias]).tanh())
            losses.append(F.mse_loss(values[-1], y).item())
            flow = 2 * (values[-1] - y) / y.numel()
            for history in histories:
                history.gradients.append({})
            for (history, weight, bias), below, above in reversed(
                list(zip(layers, values[:-1], values[1:], strict=True))
            ):
                flow = flow * (1 - above * above)
                history.gradients[-1].update({weight: flow.T @ below, bias: flow.sum(0)})
                flow = flow @ history.versions[i][weight]
            for history in histories:
                history.update()
        for history in histories:
            history.restart()
    return losses


def two_versions(
    stages: Sequence[nn.Module], passes: Passes, make_optimizer: MakeOptimizer
) -> list[float]:
    """W(t + 1) = W(t) − step(gradient at W(t − 1)), of the whole model, from W(−1) = W(0)."""
    history = History(nn.Sequential(*stages), make_optimizer)
    losses = []
    for batches in passes:
        for t, (x, y) in enumerate(batches):
            weights = history.at(max(0, t - 1))
            loss = F.mse_loss(functional_call(history.module, weights, (x,)), y)
            loss.backward()
            losses.append(loss.item())
            history.gradients.append({name: w.grad for name, w in weights.items()})
            history.update()
        history.restart()
    return losses


def model_of(layers: int = 4) -> nn.Sequential:
    """Of two blocks a layer."""
    parts = [part for _ in range(layers) for part in (nn.Linear(4, 4), nn.Tanh())]
    model = drawn(nn.Sequential(*parts))
    assert isinstance(model, nn.Sequential)
    return model


def balance_of(stages: int, layers: int = 4) -> tuple[int, ...]:
    """No layer is cut in two."""
    return tuple(2 * ((s + 1) * layers // stages - s * layers // stages) for s in range(stages))


def stages_of(model: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    stages, first = [], 0
    for count in balance:
        stages.append(model[first : first + count])
        first += count
    return stages


def batches_of(counts: Sequence[int], rows: int = 4) -> list[list[Batch]]:
    every = task("mlp")._replace(targets=task("mlp").inputs).batches([rows] * sum(counts))
    return [every[sum(counts[:n]) : sum(counts[: n + 1])] for n in range(len(counts))]


def streamed(
    layout: Layout, passes: Passes, folder: Path, make_optimizer: MakeOptimizer
) -> list[tuple[list[float], Weights]]:
    """By rank: what every step returned, and the weights in the end."""

    def body(run: Run, trainer: Trainer, model: nn.Module) -> tuple[list[float], Weights]:
        losses = []
        for batches in passes:
            losses += [trainer.step(x, y).item() for x, y in batches]
            trainer.predict(batches[0][0])  # drains: one wants to see the model as it is
        return losses, tensors_of(model)

    return in_stages(layout, model_of(), body, F.mse_loss, folder, make_optimizer)


def assert_follows(
    reference: Callable[..., list[float]],
    layout: Layout,
    counts: Sequence[int],
    folder: Path,
    make_optimizer: MakeOptimizer = sgd,
    **options: Any,
) -> None:
    passes = batches_of(counts, rows=2 * layout.microbatches)
    found = streamed(layout, passes, folder, make_optimizer)
    model = model_of()
    expected = reference(stages_of(model, layout.balance), passes, make_optimizer, **options)
    wanted = dict(model.state_dict())
    assert {name for _, weights in found for name in weights} == set(wanted)
    for rank, (_, weights) in enumerate(found):
        assert_weights(weights, wanted, f"{layout}, rank {rank}")
    assert_close(found[-1][0], expected, "the last stage has the loss of every batch at once")


stage_counts = st.integers(1, 4)
pass_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=2)
optimizers = st.sampled_from([sgd, adamw])


@settings(max_examples=9, derandomize=True)
@given(stages=stage_counts, counts=pass_lengths, optimizer=optimizers, recompute=st.booleans())
def test_pipedream(
    stages: int,
    counts: list[int],
    optimizer: MakeOptimizer,
    recompute: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layout = Layout(
        stages=stages, schedule="pipedream", balance=balance_of(stages), recompute=recompute
    )
    assert_follows(pipedream, layout, counts, tmp_path_factory.mktemp("runs"), optimizer)


@settings(max_examples=6, derandomize=True)
@given(stages=stage_counts, counts=pass_lengths, optimizer=optimizers)
def test_pipedream_with_vertical_sync(
    stages: int,
    counts: list[int],
    optimizer: MakeOptimizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layout = Layout(stages=stages, schedule="pipedream", balance=balance_of(stages), vertical=True)
    folder = tmp_path_factory.mktemp("runs")
    assert_follows(pipedream, layout, counts, folder, optimizer, vertical=True)


@settings(max_examples=6, derandomize=True)
@given(stages=stage_counts, counts=pass_lengths, optimizer=optimizers)
def test_pipedream_without_its_stash(
    stages: int,
    counts: list[int],
    optimizer: MakeOptimizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layout = Layout(stages=stages, schedule="pipedream", balance=balance_of(stages), stash=False)
    folder = tmp_path_factory.mktemp("runs")
    assert_follows(pipedream_without_stash, layout, counts, folder, optimizer)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 2), (3, 1), (2, 1, 1), (1, 2, 1)])
def test_pipedream_with_several_ranks_for_a_stage(
    replicas: tuple[int, ...], tmp_path: Path
) -> None:
    """Passes end in the middle of a round, and one is shorter than the pipeline."""
    stages = len(replicas)
    layout = Layout(
        stages=stages, schedule="pipedream", balance=balance_of(stages), replicas=replicas
    )
    passes = batches_of([7, 1, 4])
    found = streamed(layout, passes, tmp_path, sgd)
    model = model_of()
    pipedream(stages_of(model, layout.balance), passes, sgd, replicas)
    for rank, (_, weights) in enumerate(found):
        assert_weights(weights, model.state_dict(), f"rank {rank}")


@settings(max_examples=7, derandomize=True)
@given(
    stages=stage_counts,
    more=st.integers(0, 2),
    counts=pass_lengths,
    optimizer=optimizers,
    recompute=st.booleans(),
)
def test_two_buffered_weights(
    stages: int,
    more: int,
    counts: list[int],
    optimizer: MakeOptimizer,
    recompute: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layout = Layout(
        stages=stages,
        microbatches=stages + more,
        schedule="2bw",
        balance=balance_of(stages),
        recompute=recompute,
    )
    assert_follows(two_versions, layout, counts, tmp_path_factory.mktemp("runs"), optimizer)


def test_a_rank_says_the_loss_of_the_last_batch_it_is_done_with(tmp_path: Path) -> None:
    layout = Layout(stages=3, schedule="pipedream", balance=balance_of(3))
    passes = batches_of([5, 3])
    found = streamed(layout, passes, tmp_path, sgd)
    losses = pipedream(stages_of(model_of(), layout.balance), passes, sgd)
    nan = math.nan
    expected = {
        0: [nan, nan, *losses[0:3], losses[4], losses[4], losses[5]],
        1: [nan, *losses[0:4], losses[4], *losses[5:7]],
        2: losses,
    }
    for rank, wanted in expected.items():
        torch.testing.assert_close(found[rank][0], wanted, rtol=0, atol=1e-10, equal_nan=True)


def test_the_end_of_a_pass_over_the_data_drains(tmp_path: Path) -> None:
    """So does the next one's beginning, when a loop was left before its end."""
    (batches,) = batches_of([5], rows=2)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    seen = []

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Weights:
        source = TensorDataset(x, y)
        for epoch in run.epochs(2):
            for step, (inputs, targets) in enumerate(
                trainer.loader(source, batch_size=2, shuffle=False)
            ):
                trainer.step(inputs, targets)
                if epoch == 0 and step == 3:
                    break
            if run.rank == 0:
                seen.append(step + 1)
        return tensors_of(model)

    layout = Layout(stages=3, schedule="pipedream", balance=balance_of(3))
    found = in_stages(layout, model_of(), body, F.mse_loss, tmp_path)
    assert seen == [4, 5]
    model = model_of()
    pipedream(stages_of(model, layout.balance), [batches[:4], batches], sgd)
    for rank, weights in enumerate(found):
        assert_weights(weights, model.state_dict(), f"rank {rank}")


@pytest.mark.parametrize("recompute", [False, True])
def test_no_more_versions_are_kept_than_there_are_stages(recompute: bool, tmp_path: Path) -> None:
    """However long the pass is, and when activations are computed again too."""
    (batches,) = batches_of([12])
    layout = Layout(stages=3, schedule="pipedream", balance=balance_of(3), recompute=recompute)

    def body(run: Run, trainer: Trainer, model: nn.Module) -> list[int]:
        return [versions_held(trainer) for x, y in batches if trainer.step(x, y) is not None]

    held = in_stages(layout, model_of(), body, F.mse_loss, tmp_path)
    assert [max(each) for each in held[:2]] == [2, 1]  # beside the weights themselves


def versions_held(trainer: Trainer) -> int:
    (stage,) = trainer._engine._pipelined.stages.values()  # type: ignore[attr-defined]
    return len(getattr(stage.weights, "_copies", ()))


def test_what_a_stream_cannot_do_is_said(tmp_path: Path) -> None:
    (batches,) = batches_of([1], rows=2)

    def body(run: Run, trainer: Trainer, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="2bw wants 3 micro-batches, and this batch has 2"):
            trainer.step(*batches[0])

    layout = Layout(stages=2, microbatches=3, schedule="2bw", balance=balance_of(2))
    in_stages(layout, model_of(), body, F.mse_loss, tmp_path)

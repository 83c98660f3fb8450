"""The script that benchmarks/tune.py tunes, with `farandole tune` or with optuna by hand.

Both ways train the same model on the same digits: a third of the samples for training, so that
choices matter, a third for validation, and a third that nothing is chosen by.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
REPEATS = 2  # each epoch sees every sample so many times, with other noise


def data(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [(images[part], labels[part]) for part in order.tensor_split(3)]


def build(width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(width, 10),
    )


def train_batch(model: nn.Module, opt: torch.optim.Optimizer, x: Any, y: Any) -> None:
    for _ in range(REPEATS):
        opt.zero_grad()
        F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
        opt.step()


@torch.no_grad()
def predict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    found = model(x).softmax(dim=1)
    model.train()
    return found


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((predict(model, x).argmax(dim=1) == y).double().mean())


def tuned(args: argparse.Namespace) -> None:
    """With run.choose, under `farandole tune`."""
    from safetensors.torch import save_file

    import farandole as fd

    run = fd.init()
    rate = run.choose("rate", 1e-3, 1.0, log=True)
    momentum = run.choose("momentum", 0.0, 0.95)
    width = run.choose("width", 64, 512, log=True)
    dropout = run.choose("dropout", 0.0, 0.5)
    train, validation, test = data(args.seed)
    model: nn.Module = build(width, dropout)
    opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
    model, opt = run.distribute(model, opt)
    for _ in run.epochs(args.epochs):
        for x, y in run.loader(TensorDataset(*train), BATCH):
            train_batch(model, opt, x, y)
        run.log(accuracy=accuracy(model, *validation))
    run.predictions(predict(model, validation[0]), validation[1])
    unseen = {"probabilities": predict(model, test[0]), "labels": test[1]}
    save_file(unseen, run.folder / "test.safetensors")


def objective(trial: Any, args: argparse.Namespace) -> float:
    """As one writes it for optuna."""
    torch.manual_seed(args.seed)
    rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.95)
    width = trial.suggest_int("width", 64, 512, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    train, validation, _ = data(args.seed)
    model = build(width, dropout)
    opt = torch.optim.SGD(model.parameters(), rate, momentum)
    reached = 0.0
    for epoch in range(args.epochs):
        for x, y in DataLoader(TensorDataset(*train), BATCH, shuffle=True):
            train_batch(model, opt, x, y)
        reached = accuracy(model, *validation)
        trial.report(reached, epoch)
    return reached


def study_of(journal: str) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = optuna.storages.journal.JournalFileBackend(journal)
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="by-hand",
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.NopPruner(),
    )


def by_hand(args: argparse.Namespace) -> None:
    """So many of the trials that wait in the study, in this process."""
    torch.set_num_threads(1)
    study_of(args.by_hand).optimize(lambda trial: objective(trial, args), n_trials=args.trials)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=81)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-hand", metavar="JOURNAL")
    parser.add_argument("--trials", type=int, default=1)
    args = parser.parse_args()
    if args.by_hand is None:
        tuned(args)
    else:
        by_hand(args)


if __name__ == "__main__":
    main()

"""The page for those who come from Horovod: it has every call, flag and variable, and is true."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import farandole.horovod.torch as hvd
from farandole.horovod.cli import horovodrun
from farandole.horovod.cli.variables import NO_EFFECT
from farandole.horovod.engine.requests import ALLREDUCE, Request
from farandole.horovod.engine.stall import StallWatch
from farandole.horovod.engine.table import NOTHING, Announcement, Item, Table, problem_with
from farandole.horovod.settings import Settings
from farandole.testing import run_world
from farandole.testing.horovod import run_horovod
from farandole.train import Run

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()
THEIRS, OURS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def rows(heading: str) -> list[tuple[list[str], str]]:
    """What the first table of a section has in its columns: words of code on the left, a text."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    table = re.search(r"^\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    cells = [line.strip("|").split(" | ", 1) for line in table[1].splitlines()]
    return [(re.findall(r"`([^`]+)`", left), right) for left, right in cells]


def test_every_public_name_is_there_once_and_no_other() -> None:
    told = [name for names, _ in rows("The calls") for name in names]
    assert sorted(told) == sorted({*hvd.__all__, "HostsUpdatedInterrupt", "horovod.run"})
    (elastic,) = (text for names, text in rows("The calls") if names == ["elastic"])
    listed = {*re.findall(r"`(\w+)`", elastic), "HorovodInternalError", "HostsUpdatedInterrupt"}
    assert listed == set(hvd.elastic.__all__)


def test_every_flag_is_there() -> None:
    told = {flag: text for flags, text in rows("horovodrun") for flag in flags}
    options = [option for option in horovodrun.params if option.param_type_name == "option"]
    known = {word for option in options for word in (*option.opts, *option.secondary_opts)}
    assert told.keys() <= known
    for option in options:
        words = [option.secondary_opts[0]] if getattr(option, "hidden", False) else option.opts
        assert {*words} <= told.keys()
        idle = all("no effect" in told[word] for word in words)
        assert idle == (option.name in NO_EFFECT), words


def test_every_variable_is_there() -> None:
    class Recording(Mapping[str, str]):
        def __init__(self) -> None:
            self.asked: set[str] = set()

        def __getitem__(self, key: str) -> str:
            self.asked.add(key)
            raise KeyError(key)

        def __iter__(self) -> Iterator[str]:
            return iter(())

        def __len__(self) -> int:
            return 0

    environ = Recording()
    Settings.from_environ(environ)
    assert len(environ.asked) > 5
    assert environ.asked <= set(re.findall(r"`(HOROVOD_\w+)`", PAGE))


def test_it_shows_what_is_said() -> None:
    flat = re.sub(r"\s+", " ", PAGE)
    asked = [
        Request("allreduce.loss", ALLREDUCE, ("float32",), ((rows,),), "average") for rows in (3, 4)
    ]
    assert problem_with(Item(tuple(asked))) in flat
    table = Table(4, 0)
    wanted = Announcement((Request("gradient.fc.weight", ALLREDUCE, ("float32",), ((3,),)),))
    table.hear([wanted, wanted, NOTHING, wanted], now=0.0)
    usual = Settings()
    said = StallWatch(table, usual.stall_warning_seconds, 0.0).report(now=61.0)
    assert re.sub(r"\s+", " ", said) in flat


def test_both_loops_train(tmp_path: Path) -> None:
    torch.manual_seed(0)
    points = 3 * torch.randn(512, 4)
    labels = points[:, :3].argmax(dim=1)
    names: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "dataset": TensorDataset(points, labels),
        "Net": lambda: nn.Linear(4, 3),
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "print": lambda *_: None,
    }

    def theirs() -> dict[str, Any]:
        own = {**names, "hvd": hvd}
        exec(THEIRS, own)
        return own

    def ours(run: Run) -> dict[str, Any]:
        own = {**names, "fd": SimpleNamespace(init=lambda seed: run)}
        exec(OURS, own)
        return own

    for ranks in (run_horovod(2, theirs), run_world(2, ours, folder=tmp_path)):
        first, second = ([p.tolist() for p in own["model"].parameters()] for own in ranks)
        assert first == second
        assert ranks[0]["epoch"] == 9
        right = ranks[0]["model"](points).argmax(dim=1) == labels
        assert right.float().mean() > 0.7

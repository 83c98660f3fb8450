"""`farandole run --link`: pretended hosts with a link in software between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.cli import main

# 125 KB take 100 ms at 10 Mbit/s. A slow machine only takes longer.
SCRIPT = """
import time
import torch
import farandole as fd

run = fd.init()
data = torch.full((31_250,), float(run.rank + 1))
began = time.monotonic()
if run.rank == 0:
    run.group.send(data, 2)
elif run.rank == 2:
    run.group.receive(data, 0)
    assert data[0] == 1 and time.monotonic() - began > 0.09, time.monotonic() - began
run.group.barrier()
total = run.group.all_reduce(torch.ones(10))
assert total[0] == run.size
print("by", run.group.transport.name, "on", run.topology)
run.log(loss=1.0)
"""
SERVED = """
import time
import torch
import farandole as fd

run = fd.init()
model = torch.nn.Linear(250, 125)  # 125 KB
model, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
began = time.monotonic()
for _ in range(3):
    opt.zero_grad()
    model(torch.ones(1, 250)).sum().backward()
    opt.step()
if run.rank == 1:
    taken = time.monotonic() - began
    assert taken > 0.18, taken
run.log(loss=1.0)
"""


def start_record(folder: Path) -> dict[str, Any]:
    first = (folder / "metrics.jsonl").read_text().splitlines()[0]
    return dict(json.loads(first))


@pytest.mark.parametrize(("transport", "by"), [("auto", "hosts"), ("shm", "hosts")])
def test_messages_between_hosts_take_their_time(sandbox: Any, transport: str, by: str) -> None:
    script = sandbox.script("sends.py", SCRIPT)
    done = sandbox.farandole(
        "run", "-n", "4", "--pretend-hosts", "2", "--link", "10mbit,1ms", "--name", "r",
        "--transport", transport, script.name,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"by {by} on host-0: 0-1, host-1: 2-3" in done.stdout
    assert "is simulated: 10mbit,1ms" in done.stdout + done.stderr
    assert start_record(sandbox.folder / "runs/r")["simulated_link"] == "10 Mbit/s, 1 ms"


def test_so_do_requests_to_parameter_servers(sandbox: Any) -> None:
    script = sandbox.script("served.py", SERVED)
    done = sandbox.farandole(
        "run", "-n", "2", "--pretend-hosts", "2", "--link", "10mbit,1ms", "--name", "r",
        "--sync", "server", script.name,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert start_record(sandbox.folder / "runs/r")["simulated_link"] == "10 Mbit/s, 1 ms"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--link", "fast", "--pretend-hosts", "2"), "--link fast: rate 'fast'"),
        (("--link", "1gbit"), "give --pretend-hosts 2"),
        (("--link", "1gbit", "--pretend-hosts", "2", "--transport", "mpi"), "--transport mpi"),
        (("--link", "1gbit", "--pretend-hosts", "2", "--horovod"), "Leave out --link"),
        (("--link", "1gbit", "--pretend-hosts", "2", "-H", "a:1,b:1"), "real ones"),
        (("--link", "1gbit", "--pretend-hosts", "2", "--min", "1"), "pretended hosts"),
    ],
)
def test_where_there_can_be_no_link_it_is_refused(
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    workers = () if "-H" in arguments else ("-n", "2")
    monkeypatch.setattr(sys, "argv", ["farandole", "run", *workers, *arguments, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err

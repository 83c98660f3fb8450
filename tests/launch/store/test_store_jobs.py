"""Jobs of real processes on our store: our own ranks, and scripts that speak to torch alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

GROUPS = """
import json, os, torch, torch.distributed as dist
own = {own}
if own:
    import farandole as fd
    fd.init()
else:
    dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.ones(1)
dist.all_reduce(total)
pair = dist.new_group([0, 1])
halves, _ = dist.new_subgroups(2)
part = torch.tensor([float(rank)])
dist.all_reduce(part, group=halves)
objects = [None] * size
dist.all_gather_object(objects, rank)
dist.monitored_barrier()
store = dist.distributed_c10d._get_default_store()
store.set(f"last/{{rank}}", "x")
store.wait([f"last/{{other}}" for other in range(size)])
print(json.dumps([total.item(), part.item(), objects, os.environ["FARANDOLE_STORE"]]))
dist.barrier()
if not own:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("own", [True, False])
def test_groups_and_subgroups_of_four_ranks(sandbox: Sandbox, own: bool) -> None:
    script = sandbox.script("groups.py", GROUPS.format(own=own))
    done = sandbox.farandole("run", "-n", "4", script)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    found = [json.loads(line.partition(" ")[2]) for line in lines]
    assert [each[:3] for each in found] == [
        [4.0, 1.0 if rank < 2 else 5.0, [0, 1, 2, 3]] for rank in range(4)
    ]
    assert "never joined" not in done.stderr
    left = [path.name for path in sandbox.temporary.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch 2.11's


WAITING = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1] + os.environ["RANK"]).write_text(os.environ["FARANDOLE_STORE"])
while not Path(sys.argv[1] + "end").exists():
    time.sleep(0.02)
"""


def test_what_a_job_of_one_host_listens_on(sandbox: Sandbox) -> None:
    script = sandbox.script("waiting.py", WAITING)
    mark = sandbox.folder / "mark-"
    job = sandbox.start_farandole("run", "-n", "1", script, str(mark))
    told = Path(f"{mark}0")
    sandbox.wait_until(lambda: told.exists() and told.read_text() != "", "the worker is there")
    path = Path(told.read_text().split(":", 2)[2])
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_uid == os.getuid()
    listening = [
        end.laddr.ip
        for process in sandbox.processes()
        for end in process.net_connections("tcp")
        if end.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1"}
    Path(f"{mark}end").touch()
    assert sandbox.finish(job).returncode == 0
    assert list(sandbox.temporary.iterdir()) == []


def test_ranks_of_several_hosts_with_a_token(sandbox: Sandbox, free_port: str) -> None:
    """Two hosts, say the variables; both are this one."""
    script = sandbox.script(
        "with_token.py", "import farandole as fd\nprint(fd.init(timeout=20).size, flush=True)\n"
    )
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    same = [common | {"RANK": str(rank), "FARANDOLE_TOKEN": "t" * 40} for rank in range(2)]
    ends = sandbox.by_hand(same, script)
    assert [end.stdout.strip() for end in ends] == ["2", "2"], [end.stderr for end in ends]
    other = [same[0], same[1] | {"FARANDOLE_TOKEN": "u" * 40}]
    first, second = sandbox.by_hand(
        other, sandbox.script("short.py", "import farandole as fd\nfd.init(timeout=4)\n")
    )
    assert "does not hold this job's token" in second.stderr
    assert "waited 4 s for rank(s) [1] of 2" in first.stderr

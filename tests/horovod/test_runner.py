"""`horovod.run(func, …)`: functions by name, arguments and results without pickle."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.errors import LaunchError, UserError
from farandole.horovod import run
from farandole.horovod import runner as module
from farandole.horovod.runner.call import Call
from farandole.launch.job import Job, Outcome

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = """
import torch
import horovod
import horovod.torch as hvd
from elsewhere import fail

def train(scale, *, words):
    hvd.init()
    mean = hvd.allreduce(torch.ones(2) * hvd.rank() * scale)
    return {"rank": hvd.rank(), "mean": mean, "words": words, "main": __name__}

class Steps:
    @staticmethod
    def twice(number):
        return 2 * number

if __name__ == "__main__":
    first, second = horovod.run(train, args=(torch.tensor(4.0),), kwargs={"words": ("a", None)},
                                num_proc=2, disable_cache=True, use_gloo=True)
    for rank, found in enumerate((first, second)):
        assert found["rank"] == rank and found["words"] == ("a", None), found
        assert found["mean"].tolist() == [2.0, 2.0], found
        assert found["main"] != "__main__"
    try:
        horovod.run(fail, (Steps.twice(3),))
    except Exception as error:
        print(type(error).__name__, error)
"""
ELSEWHERE = """
def fail(number):
    raise KeyError(f"six is {number}")
"""


def test_a_function_of_the_script_and_one_that_fails(sandbox: Sandbox) -> None:
    sandbox.script("elsewhere.py", ELSEWHERE)
    script = sandbox.script("train.py", SCRIPT)
    done = sandbox.python(script, PYTHONPATH=_with_shim(sandbox))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LaunchError horovod.run(): rank 0 failed: KeyError: 'six is 6'")
    assert sandbox.processes() == []
    assert [path.name[:15] for path in sandbox.temporary.iterdir()] == ["farandole-logs-"]


def _with_shim(sandbox: Sandbox) -> str:
    from farandole.horovod.aliases import shim_variables

    return shim_variables(sandbox.environment)["PYTHONPATH"]


def test_a_call_that_is_not_guarded(sandbox: Sandbox) -> None:
    text = "from farandole.horovod import run\ndef f():\n    pass\nrun(f)\n"
    done = sandbox.fork(sandbox.script("train.py", text))
    assert done.returncode == 1
    assert "UserError: horovod.run() is called while a worker imports the script" in done.stderr
    assert 'Put the call below if __name__ == "__main__":' in done.stderr


def plain() -> None:
    """A function that workers could import."""


def shadowed() -> None:
    """A function under whose name there is another."""


hidden, shadowed = shadowed, plain


class Thing:
    def method(self) -> None:
        """Belongs to an object, which does not travel."""


@pytest.mark.parametrize(
    "func", [lambda: 1, functools.partial(plain), Thing().method, hidden, Thing()]
)
def test_a_function_that_workers_cannot_import(func: Any) -> None:
    with pytest.raises(UserError, match="Define it with def, at the top level of a module"):
        run(func)


def test_a_closure() -> None:
    def inner() -> None:
        """Knows what is around it."""

    with pytest.raises(UserError, match="it is made on the spot"):
        run(inner)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_np": 1}, r"min_np=1: the number of workers is fixed here\. Start a script"),
        ({"max_num_proc": 4}, "max_num_proc=4"),
        ({"slots": 4}, "slots=4"),
        ({"reset_limit": 4}, "reset_limit=4"),
        ({"cooldown_range": (1, 2)}, "cooldown_range="),
        ({"use_mpi": True}, r"use_mpi=True: .* farandole horovodrun --mpi"),
        ({"mpi_args": "-x A"}, "mpi_args="),
        ({"num_proc": 0}, "num_proc=0"),
        ({"np": 3, "hosts": "localhost:2"}, "3 workers on 2 slots"),
        ({"hosts": "a:1", "hostfile": "b"}, "give one of them"),
        ({"ssh_port": 22}, "ssh_port=22 is for other hosts"),
        (
            {"network_interface": "lo", "hosts": "localhost:1"},
            "network_interface='lo' is for other",
        ),
        ({"args": ({1, 2},)}, r"an argument of horovod.run\(\) cannot be sent .*args\.0 is a set"),
        ({"kwargs": {"f": print}}, r"kwargs\.f is a builtin_function_or_method"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(plain, **arguments)


def test_where_and_how_it_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    def launch(job: Job, *where: Any, connect_seconds: float) -> Outcome:
        assert connect_seconds > 5  # ssh has as long as the start
        call = Call.read(Path(job.command[-1]))
        seen.append((job, *where, call))
        return Outcome()

    monkeypatch.setattr(module, "launch_on_hosts", launch)
    with pytest.raises(LaunchError, match=r"rank 0 on far\.invalid has ended and left no result"):
        run(
            plain,
            np=2,
            hosts="far.invalid:1,localhost:4",
            ssh_port=22,
            start_timeout=5,
            network_interface="eth0,eth1",
            executable="/opt/python",
            output_filename="kept",
        )
    ((job, topology, ssh, interfaces, call),) = seen
    assert (job.program, job.output) == ("/opt/python", Path("kept"))
    assert str(topology) == "far.invalid: 0, localhost: 1"
    assert (ssh.port, ssh.connect_seconds, interfaces) == (22, 5, ["eth0", "eth1"])
    assert Path(job.command[-1]).parent == tmp_path  # where other hosts may see it
    assert not list(tmp_path.iterdir())
    assert call.function.find() is plain

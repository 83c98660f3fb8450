"""`farandole run --on`: the table of engines, and options that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from farandole.cli import commands
from farandole.errors import UserError
from farandole.launch.engines import catalog
from farandole.launch.engines.request import EngineRequest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--on", "slrm"),
            "there is no such engine. Did you mean 'slurm'? Known: local, ssh,",
        ),
        (("--on", "zzz"), "no such engine. Known: local, ssh, slurm, mpi, ray, kubernetes."),
        (
            ("--partition", "a"),
            "--partition has no meaning under --on local; it is for --on sl",
        ),
        (
            ("--nodes", "2"),
            "it is for --on slurm, mpi, ray, kubernetes. Give the number",
        ),
        (("--on", "local", "-H", "a:2"), "--on local and hosts (a:2): leave one of them out"),
        (("--on", "ssh"), "--on ssh: name the hosts, as in -H node1:4,node2:4"),
        (("--on", "ray", "-H", "a:2"), "--hosts: --on ray knows its own hosts"),
        (("--on", "slurm", "--per-node", "0"), "--per-node 0: give 1 or more"),
        (("--on", "slurm", "--gpus", "-1"), "--gpus -1: give a number of them"),
    ],
)
def test_what_does_not_go_together(arguments: tuple[str, ...], message: str) -> None:
    error = CliRunner().invoke(commands, ["run", *arguments, __file__]).exception
    assert isinstance(error, UserError)
    assert message in str(error)


def test_an_engine_is_a_module_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which gets the options as they were given, for a command of its own."""
    requests: list[EngineRequest] = []

    class Recorded(catalog.Engine):
        def start(self, request: EngineRequest) -> int:
            requests.append(request)
            return 7

    monkeypatch.setitem(catalog.ENGINES, "mine", Recorded("for this test", "mine", ("output",)))
    done = CliRunner().invoke(
        commands,
        [
            *("run", "--on", "mine", "--nodes", "3", "--per-node", "2", "--output", "x"),
            *("--seed", "7", "--no-fork", "--stall", "1.5", "--network-interfaces", "a"),
            *("--network-interfaces", "b,c", "--name", "n", __file__, "-n", "--seed=8", "a b"),
        ],
    )
    assert done.exit_code == 7, done.output
    (request,) = requests
    assert (request.nodes, request.per_node, request.workers, request.is_counted) == (3, 2, 6, True)
    assert request.settings == {"output": Path("x")}
    assert request.command == (__file__, "-n", "--seed=8", "a b")
    # Another `farandole run` reads the same again.
    assert request.words == (
        *("run", "--network-interfaces=a", "--network-interfaces=b,c", "--seed=7"),
        *("--stall=1.5", "--no-fork", __file__, "-n", "--seed=8", "a b"),
    )
    assert request.interfaces == ("a", "b", "c")

"""From lists of hosts, host files and schedulers to which rank is on which host."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from farandole.errors import UserError
from farandole.launch.hosts import HERE
from farandole.launch.placement.placement import HostOptions, Placement, place

NAME = platform.node()


def placed(
    options: HostOptions, workers: int | None = None, environ: dict[str, str] | None = None
) -> Placement:
    found = place(options, workers, environ or {})
    assert found is not None
    return found


def test_nothing_describes_hosts() -> None:
    assert place(HostOptions(), 4, {}) is None


def test_a_list_of_hosts_and_all_its_slots() -> None:
    options = HostOptions("far.invalid:2,localhost:3", ssh_port=2222, network_interfaces=("a,b",))
    found = placed(options)
    assert str(found.topology) == "far.invalid: 0-1, localhost: 2-4"
    assert found.others == ["far.invalid"]
    assert not found.rank0_is_here
    assert found.interfaces == ("a", "b")
    words = found.channel.words("far.invalid", ["true"])
    assert words[-4:] == ["-p", "2222", "far.invalid", "true"]
    assert str(placed(options, 3).topology) == "far.invalid: 0-1, localhost: 2"
    again = " ".join(options.words())
    assert again == "-H far.invalid:2,localhost:3 --ssh-port 2222 --network-interfaces a,b"


def test_this_host_alone() -> None:
    found = placed(HostOptions(f"{NAME}:2"))
    assert str(found.topology) == "localhost: 0-1"
    assert found.rank0_is_here
    assert found.others == []


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a.invalid slots=2\nb.invalid:1 # small\n")
    assert str(placed(HostOptions(hostfile=path)).topology) == "a.invalid: 0-1, b.invalid: 2"


TOML = """
[[host]]
name = "a.invalid"
slots = 2
port = 2200
user = "ann"

[[host]]
name = "b.invalid"
"""


def test_a_host_file_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(TOML)
    found = placed(HostOptions(hostfile=path, ssh_port=22, ssh_identity_file=Path("key")))
    assert str(found.topology) == "a.invalid: 0-1, b.invalid: 2"
    words = found.channel.words("a.invalid", ["true"])
    assert words[-6:] == ["-p", "2200", "-i", "key", "ann@a.invalid", "true"]
    assert found.channel.words("b.invalid", ["true"])[-6:-4] == ["-p", "22"]
    assert "-p 2200 -i key ann@a.invalid" in found.channel.advice("a.invalid")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("host = 3", "names no host"),
        ("[[host]\n", "is no TOML"),
        ("[[hosts]]\nname = 'a'", "there is no key 'hosts'. Did you mean 'host'?"),
        ("[[host]]\nslots = 2", "host 1 has no name"),
        ("[[host]]\nname = 'a'\nslot = 2", "host 1: there is no key 'slot'. Did you mean 'slots'?"),
        ("[[host]]\nname = 'a'\nslots = 0", "slots = 0 must be a whole number, 1 or more"),
        ("[[host]]\nname = 'a'\nslots = true", "slots = True must be a whole number"),
        ("[[host]]\nname = 'a'\nport = 70000", "port = 70000 must be a whole number, 1 to 65535"),
        ("[[host]]\nname = '-oProxyCommand=x'", "'-oProxyCommand=x' is no name"),
        ("[[host]]\nname = 'a'\nuser = '-l'", "host 1: user: '-l' is no name"),
        ("[[host]]\nname = 'a'\n[[host]]\nname = 'a'", "lists host a twice"),
        ("[[host]]\nname = 'localhost'\nport = 22", "localhost with port = 22: it is this host"),
        ("host = [3]", "write [[host]]"),
    ],
)
def test_what_is_no_host_file_in_toml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        place(HostOptions(hostfile=path), None, {})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("a.invalid:2,b.invalid:1,a.invalid:2", "-H lists host a.invalid twice. List it once, with "
         "all its slots: a.invalid:4"),
        (f"localhost:1,{NAME}:2", f"localhost and {NAME} are the same host"),
        ("127.0.0.1:1,localhost:2", "127.0.0.1 and localhost are the same host"),
        ("a.invalid:00", "is no host with slots"),
    ],
)  # fmt: skip
def test_hosts_that_cannot_be(hosts: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        place(HostOptions(hosts), None, {})
    assert message in str(raised.value)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"-H a:1 and --hostfile .*: give one of them"):
        place(HostOptions("a:1", tmp_path), None, {})
    with pytest.raises(UserError, match="--ssh-port 22 is for other hosts"):
        place(HostOptions(ssh_port=22), None, {})
    with pytest.raises(UserError, match="--network-interfaces eth0 is for other hosts"):
        place(HostOptions("localhost:2", network_interfaces=("eth0",)), None, {})
    with pytest.raises(UserError, match="3 workers on 2 slots"):
        place(HostOptions("localhost:2"), 3, {})


SLURM = {"SLURM_JOB_NODELIST": "n[1-2].invalid,x.invalid", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def test_slurm() -> None:
    assert str(placed(HostOptions(), None, SLURM).topology) == (
        "n1.invalid: 0-1, n2.invalid: 2-3, x.invalid: 4"
    )
    # What the user says takes precedence.
    assert str(placed(HostOptions("localhost:2"), None, SLURM).topology) == f"{HERE}: 0-1"
    with pytest.raises(UserError, match=r"-n 6: the Slurm allocation has 5 slots \(n1.*--ntasks 6"):
        place(HostOptions(), 6, SLURM)


def test_nodes_of_slurm_are_reached_by_srun(tmp_path: Path) -> None:
    (tmp_path / "srun").touch(0o755)
    known = {**SLURM, "PATH": str(tmp_path), "SLURMD_NODENAME": "n2.invalid"}
    found = placed(HostOptions(), None, known)
    assert str(found.topology) == f"n1.invalid: 0-1, {HERE}: 2-3, x.invalid: 4"
    assert found.channel.words("x.invalid", ["true"])[0] == "srun"
    assert found.note is None
    # By ssh where the user asks for it, or names the hosts.
    for options in (HostOptions(ssh_port=2222), HostOptions("x.invalid:1")):
        assert placed(options, None, known).channel.words("x.invalid", ["true"])[0] == "ssh"
    without = placed(HostOptions(), None, {**known, "PATH": ""})
    assert without.channel.words("x.invalid", ["true"])[0] == "ssh"
    assert without.note == (
        "there is no srun on the PATH: the nodes n1.invalid, x.invalid of the Slurm job are "
        "reached by ssh"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_TASKS_PER_NODE": "2"}, "3 nodes.*SLURM_TASKS_PER_NODE=2 .1 nodes"),
        ({"SLURM_TASKS_PER_NODE": ""}, "do not go together"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "no list of nodes"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}, "srun has started 3 of this command"),
    ],
)
def test_slurm_that_cannot_be_read(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(HostOptions(), None, SLURM | changes)


def test_pbs_and_lsf(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("a.invalid\na.invalid\nb.invalid\n")
    expected = "a.invalid: 0-1, b.invalid: 2"
    for variables in (
        {"PBS_NODEFILE": str(path)},
        {"LSB_DJOB_HOSTFILE": str(path)},
        {"LSB_MCPU_HOSTS": "a.invalid 2 b.invalid 1"},
    ):
        assert str(placed(HostOptions(), None, variables).topology) == expected
        with pytest.raises(UserError, match=r"-n 4: the .* allocation has 3 slots"):
            place(HostOptions(), 4, variables)
    with pytest.raises(UserError, match=r"PBS_NODEFILE=.*gone cannot be read"):
        place(HostOptions(), None, {"PBS_NODEFILE": str(tmp_path / "gone")})
    with pytest.raises(UserError, match="LSB_MCPU_HOSTS='a 2 b' is not what LSF writes"):
        place(HostOptions(), None, {"LSB_MCPU_HOSTS": "a 2 b"})
    path.write_text("")
    with pytest.raises(UserError, match="names no host"):
        place(HostOptions(), None, {"PBS_NODEFILE": str(path)})

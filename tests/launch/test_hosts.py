"""Host lists, host files and discovery scripts: what is read from them, and who sits where."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import LaunchError, UserError
from farandole.launch.backends.remote.exported import exported
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.hosts import gathered, parse_hosts, place_workers, read_hostfile
from farandole.launch.policies.elastic.host_script import discover_by_script
from farandole.launch.rank_variables import horovod_rank_variables, rank_variables
from farandole.worker.network import address_for, interface_towards
from farandole.worker.store.address import launcher_store
from farandole.worker.store.job_store import JobStore


def test_a_list_of_hosts_keeps_its_order_and_adds_up() -> None:
    found = parse_hosts("b:2, a.example.org:4,10.0.0.7,b:1")
    assert list(found.items()) == [("b", 3), ("a.example.org", 4), ("10.0.0.7", 1)]


@pytest.mark.parametrize(
    "text", ["", "a:0", "a:-1", "a:two", ":2", "a b:2", "-oProxyCommand=x:2", "a:2,,b:2", "ä:1"]
)
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UserError, match="is no host with slots"):
        parse_hosts(text, "-H")


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nfirst slots=2\nsecond:3 # of Ann\n  third\nfirst slots = 1\n")
    assert read_hostfile(path) == {"first": 3, "second": 3, "third": 1}
    path.write_text("first slots=2\nsecond slots=many\n")
    with pytest.raises(UserError, match=r"hosts, line 2: 'second slots=many' is no host"):
        read_hostfile(path)
    path.write_text("# nobody\n")
    with pytest.raises(UserError, match="names no host"):
        read_hostfile(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_hostfile(tmp_path / "nowhere")


def test_all_names_of_this_host_are_one() -> None:
    hosts = {"localhost": 1, "far.invalid": 4, "127.0.0.1": 2, platform.node(): 3}
    assert list(gathered(hosts).items()) == [("localhost", 6), ("far.invalid", 4)]


def test_workers_fill_one_host_after_the_other() -> None:
    topology = place_workers({"a": 2, "b": 3, "c": 2}, 4)
    assert str(topology) == "a: 0-1, b: 2-3"
    with pytest.raises(UserError, match=r"8 workers on 7 slots \(a:2, b:3, c:2\): ask for 1 to 7"):
        place_workers({"a": 2, "b": 3, "c": 2}, 8)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_seats_in_horovods_words_agree_on_all_ranks(slots: list[int], data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, sum(slots)))
    topology = place_workers({f"h{index}": count for index, count in enumerate(slots)}, workers)
    seats = [horovod_rank_variables(topology, rank) for rank in range(workers)]
    for this in seats:
        host = [
            assignment
            for assignment in seats
            if assignment["HOROVOD_HOSTNAME"] == this["HOROVOD_HOSTNAME"]
        ]
        like = [
            assignment
            for assignment in seats
            if assignment["HOROVOD_LOCAL_RANK"] == this["HOROVOD_LOCAL_RANK"]
        ]
        assert int(this["HOROVOD_LOCAL_SIZE"]) == len(host)
        assert int(this["HOROVOD_LOCAL_RANK"]) == host.index(this)
        assert int(this["HOROVOD_CROSS_SIZE"]) == len(like)
        assert int(this["HOROVOD_CROSS_RANK"]) == like.index(this)
        assert int(this["HOROVOD_SIZE"]) == workers


def test_a_rank_on_the_second_host(tmp_path: Path) -> None:
    topology = place_workers({"a": 2, "b": 2}, 3)
    store = JobStore(tmp_path)
    endpoint = LauncherEndpoint(store, "10.0.0.1", is_shared=True, interfaces=("eth0",))
    variables = {**rank_variables(topology, 2, "job"), **endpoint.remote_variables()}
    store.close()
    assert launcher_store(variables) == store.elsewhere()
    expected = {"RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    expected |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
    expected |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert expected.items() <= variables.items()


def test_the_address_of_an_interface() -> None:
    assert address_for(["far.invalid"], ["lo"]) == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    with pytest.raises(UserError, match=r"no network interface eth77 .* There are: .*lo"):
        address_for(["far.invalid"], ["eth77"])
    with pytest.raises(UserError, match=r"no way leads from here to host far\.invalid"):
        address_for(["far.invalid"])


def test_the_words_for_ssh_are_safe() -> None:
    words = Ssh(2222, Path("/keys/a b"), 9).words("there", ["env", "A=x y; rm -rf /", "python"])
    assert words[-2:] == ["there", "env 'A=x y; rm -rf /' python"]
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-i") + 1] == "/keys/a b"
    assert {"BatchMode=yes", "ConnectTimeout=9"} <= set(words)


def test_variables_of_this_host_stay_here() -> None:
    given = {"HOME": "/root", "SSH_AUTH_SOCK": "x", "SLURM_PROCID": "3", "MODE": "a", "HOME2": "b"}
    assert exported(given) == {"MODE": "a", "HOME2": "b"}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_discovery_script(tmp_path: Path) -> None:
    path = script(tmp_path / "hosts.sh", f"cat {tmp_path}/now")
    discover = discover_by_script(path, slots=3)
    (tmp_path / "now").write_text("far.invalid:2\nlocalhost\n\n127.0.0.1:1\n")
    assert discover() == {"far.invalid": 2, "localhost": 3, "127.0.0.1": 1}
    (tmp_path / "now").write_text("")
    assert discover() == {}
    (tmp_path / "now").write_text("far.invalid: 2\n")
    with pytest.raises(LaunchError, match=r"hosts\.sh, line 1: 'far\.invalid: 2' is no host"):
        discover()
    (tmp_path / "now").unlink()
    with pytest.raises(LaunchError, match=r"exit code 1: cat: .*No such file"):
        discover()


def test_a_discovery_script_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no host discovery script"):
        discover_by_script(tmp_path / "nowhere")
    path = script(tmp_path / "hosts.sh", "exec sleep 600")
    with pytest.raises(LaunchError, match=r"did not end within 0\.1 s"):
        discover_by_script(path, timeout_seconds=0.1)()
    path.write_text("no interpreter")
    with pytest.raises(LaunchError, match="cannot be run"):
        discover_by_script(path)()
    path.chmod(0o644)
    with pytest.raises(UserError, match="is not executable: chmod"):
        discover_by_script(path)

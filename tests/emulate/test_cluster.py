"""The emulated cluster: what it refuses, what its hosts are like, and that nothing stays of it."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.emulate import namespaces
from farandole.emulate.cluster import NETWORK, Cluster, refuse_collision
from farandole.emulate.link import ShapedLink
from farandole.errors import LaunchError, UserError

REPOSITORY = Path(__file__).parents[2]
FORKED = Path(__file__).parent / "scripts" / "forked.py"


@pytest.fixture(scope="module")
def cluster(root: None) -> Iterator[Cluster]:
    with Cluster(hosts=2, rate="200mbit") as made:
        yield made


def output(cluster: Cluster, host: int, command: list[str], **variables: str) -> str:
    process = cluster.start(
        host, command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    return said


# What it refuses, which needs no root.


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("100kbit", 10**5), (" 40mbit ", 4 * 10**7)],
)
def test_rates(rate: str, bits: int) -> None:
    assert ShapedLink.parse(rate).bits_per_second == bits


@pytest.mark.parametrize(
    "rate", ["", "fast", "1", "gbit", "-1gbit", "0gbit", "1gbps", "1bit", "101gbit", "nanmbit"]
)
def test_bad_rates(rate: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(rate))):
        Cluster(rate=rate)


def test_delays() -> None:
    assert [
        ShapedLink.parse("1gbit", text).delay_microseconds for text in ("1ms", "0.25ms", "2s")
    ] == [
        1_000,
        250,
        2_000_000,
    ]
    assert ShapedLink.parse("1gbit").delay_microseconds == 0


@pytest.mark.parametrize("delay", ["", "1", "0ms", "-1ms", "1min", "11s"])
def test_bad_delays(delay: str) -> None:
    with pytest.raises(UserError, match="leave it out"):
        Cluster(delay=delay)


@pytest.mark.parametrize("hosts", [-1, 0, 17])
def test_bad_numbers_of_hosts(hosts: int) -> None:
    with pytest.raises(UserError, match=f"^{hosts} emulated hosts.* 1 to 16"):
        Cluster(hosts=hosts)


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/24", "fd00::/64", "10.0.0.0/30"])
def test_bad_networks(network: str) -> None:
    with pytest.raises(UserError, match=re.escape(network)):
        Cluster(hosts=3, network=network)


@pytest.mark.parametrize("destination", ["198.18.0.0/15", "198.18.0.7", "198.0.0.0/8"])
def test_a_network_in_use_is_refused(destination: str) -> None:
    with pytest.raises(UserError, match=f"collides with {re.escape(destination)}.*--network"):
        refuse_collision(ipaddress.IPv4Network(NETWORK), ["10.0.0.0/8", destination])


def test_a_default_route_is_not_a_collision() -> None:
    refuse_collision(ipaddress.IPv4Network(NETWORK), ["default", "128.0.0.0/1", "192.168.0.0/16"])


def test_without_root_the_error_shows_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "orig_argv", ["python", "/opt/bin/farandole", "emulate", "--", "a b"])
    with pytest.raises(UserError) as raised, Cluster():
        pass
    command = f"sudo {sys.executable} /opt/bin/farandole emulate -- 'a b'"
    assert str(raised.value).endswith(command)
    assert "\n" not in str(raised.value)


def test_a_root_without_capabilities_is_recognised() -> None:
    everything, net_admin, sys_admin = 0x1FFFFFFFFFF, 1 << 12, 1 << 21
    lacking = {
        rights: namespaces.missing_capabilities(f"Name:\tsh\nCapEff:\t{rights:016x}\nCapBnd:\t0\n")
        for rights in (everything, everything ^ net_admin, everything ^ sys_admin, 0)
    }
    assert list(lacking.values()) == [
        [],
        ["CAP_NET_ADMIN"],
        ["CAP_SYS_ADMIN"],
        ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"],
    ]


def test_missing_tools_name_their_package(root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"ip, tc.*apt install iproute2"):
        namespaces.require_root()


# What the hosts are like.


def test_a_host_knows_who_it_is(cluster: Cluster) -> None:
    for host in range(2):
        said = output(cluster, host, ["sh", "-c", "hostname; ls /sys/class/net; env"])
        lines = said.splitlines()
        assert lines[:3] == [f"emulated-{host}", "eth0", "lo"]
        assert {
            f"FARANDOLE_EMULATED_HOST={host}",
            "FARANDOLE_EMULATED_HOSTS=2",
            "FARANDOLE_EMULATED_ADDRESSES=198.18.0.1,198.18.0.2",
            "MASTER_ADDR=198.18.0.1",
            f"NODE_RANK={host}",
            "NNODES=2",
            "GLOO_SOCKET_IFNAME=eth0",
            "NCCL_SOCKET_IFNAME=eth0",
        } <= set(lines[3:])


def test_env_and_cwd_reach_the_command(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.start(
        1, ["sh", "-c", "pwd; echo $NODE_RANK"], env={"NODE_RANK": "mine"}, cwd=tmp_path,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    said, _ = process.communicate(timeout=150)
    assert said.split() == [str(tmp_path), "mine"]


def test_hosts_find_each_other_by_name(cluster: Cluster) -> None:
    assert output(cluster, 1, ["getent", "hosts", "emulated-0"]).split()[0] == "198.18.0.1"


def test_the_token_bucket_is_on_both_ends_of_each_link(cluster: Cluster) -> None:
    for name, interfaces in ((0, ["eth0"]), (1, ["eth0"]), ("switch", ["port0", "port1"])):
        shown = subprocess.check_output(
            ["tc", "-n", cluster.namespace(name), "-j", "qdisc", "show"], text=True
        )
        found = {row["dev"]: row for row in json.loads(shown) if row["kind"] == "tbf"}
        assert sorted(found) == interfaces
        for row in found.values():
            assert row["options"]["rate"] == 200_000_000 / 8  # tc says bytes


def test_shared_memory_belongs_to_one_host(cluster: Cluster) -> None:
    name = f"farandole-test-{os.getpid()}"
    output(cluster, 0, ["touch", f"/dev/shm/{name}"])
    assert output(cluster, 0, ["ls", "/dev/shm"]).split() == [name]
    assert output(cluster, 1, ["ls", "/dev/shm"]).split() == []
    assert not Path("/dev/shm", name).exists()


def test_the_process_is_the_command_itself(cluster: Cluster) -> None:
    process = cluster.start(0, ["sleep", "600"])
    process.terminate()
    assert process.wait(timeout=150) == -15


def test_an_unknown_host(cluster: Cluster) -> None:
    with pytest.raises(UserError, match="no host 2 among 2"):
        cluster.start(2, ["true"])


ALL_REDUCE = """
from pathlib import Path
import farandole as fd, torch, torch.distributed as dist

run = fd.init(timeout=150, folder="{folder}")
tensor = torch.full((250_000,), float(run.rank + 1))
dist.all_reduce(tensor)
assert tensor.unique().tolist() == [10.0], tensor
sent = int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
print(f"{{run.topology}}; local {{run.local_rank}} of {{run.local_size}}; sent {{sent > 500_000}}")
"""


def test_an_all_reduce_crosses_the_links(cluster: Cluster, tmp_path: Path) -> None:
    """Two hosts of two ranks, each started by hand, join over TCP and see two hosts."""
    script = tmp_path / "job.py"
    script.write_text(ALL_REDUCE.format(folder=tmp_path))
    common = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = str(REPOSITORY)
    hosts = []
    for host in range(2):
        ranks = [{"RANK": str(2 * host + local), "LOCAL_RANK": str(local)} for local in range(2)]
        (tmp_path / str(host)).mkdir()
        request = {
            "folder": str(tmp_path / str(host)),
            "variables": {**os.environ, **cluster.variables(host), **common},
            "ranks": ranks,
            "arguments": [str(script)],
        }
        (tmp_path / f"{host}.json").write_text(json.dumps(request))
        started = cluster.start(
            host,
            ["sh", "-c", f'exec "$@" < {host}.json', "sh", sys.executable, FORKED, "torch"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        hosts.append(started)
    said = [host.communicate(timeout=150) for host in hosts]
    errors = [path.read_text() for path in tmp_path.glob("*/*.err")]
    assert [json.loads(out) for out, _ in said] == [[0, 0]] * 2, errors
    for host in range(2):
        for local in range(2):
            topology = "emulated-0: 0-1, emulated-1: 2-3"
            out = (tmp_path / str(host) / f"{local}.out").read_text()
            assert out == f"{topology}; local {local} of 2; sent True\n"


# What stays of it: nothing.


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def interfaces() -> list[str]:
    rows = json.loads(subprocess.check_output(["ip", "-json", "link"], text=True))
    return sorted(row["ifname"] for row in rows)


def start_daemon_and_fail(cluster: Cluster, started: list[int]) -> None:
    assert len(namespaces.existing(cluster.prefix)) == 4
    # A daemon has a session of its own, and its parent is gone.
    process = cluster.start(
        2, ["sh", "-c", "setsid sleep 600 >&- 2>&- & echo $!"], stdout=subprocess.PIPE
    )
    started.append(int(process.communicate(timeout=150)[0]))
    started.append(cluster.start(0, ["sleep", "600"]).pid)
    assert all(map(is_running, started))
    raise RuntimeError("a test failed")


def test_leaving_removes_hosts_and_every_process(root: None) -> None:
    before = interfaces()
    started: list[int] = []
    with pytest.raises(RuntimeError, match="a test failed"), Cluster(hosts=3) as cluster:
        start_daemon_and_fail(cluster, started)
    assert len(started) == 2
    assert not any(map(is_running, started))
    assert namespaces.existing(cluster.prefix) == []
    assert interfaces() == before


def test_a_start_that_fails_leaves_nothing(root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.emulate.cluster._INIT", "echo out of order; exit 3")
    cluster = Cluster(hosts=2)
    with pytest.raises(LaunchError, match="emulated-0 did not start: out of order"), cluster:
        pass
    assert namespaces.existing(cluster.prefix) == []


def test_delay_or_a_clear_refusal(root: None) -> None:
    """Kernels differ: with netem the delay is there, without it the error says so."""
    cluster = Cluster(hosts=1, rate="1gbit", delay="20ms")
    try:
        with cluster:
            outcome = output(cluster, 0, ["tc", "qdisc", "show", "dev", "eth0"])
    except UserError as error:
        outcome = str(error)
    assert re.search(r"netem .*delay 20ms|no netem .*qdisc kind is unknown", outcome)
    assert namespaces.existing(cluster.prefix) == []


def test_only_the_dead_leave_something_over() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = namespaces.new_prefix()
    pid, start_time = own.split("-")[1:3]
    assert not namespaces.is_leftover(f"{own}0")
    assert namespaces.is_leftover(f"farandole-{ended.pid}-{start_time}-abcd-0")
    assert namespaces.is_leftover(f"farandole-{pid}-{int(start_time) - 1}-abcd-switch")
    assert not namespaces.is_leftover("farandole-lab")
    assert not namespaces.is_leftover(f"other-{ended.pid}-1-abcd-0")


def pids_in(name: str) -> list[str]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return done.stdout.split()


def test_the_next_start_removes_what_a_killed_one_left(root: None) -> None:
    with Cluster(hosts=1) as alive:
        ended = subprocess.Popen(["true"])
        ended.wait()
        name = f"farandole-{ended.pid}-1-{os.urandom(2).hex()}-0"
        # Any other cluster that starts meanwhile may remove it too; so it may be gone already.
        sleeper = subprocess.Popen(
            ["sh", "-c", f"ip netns add {name} && exec ip netns exec {name} sleep 600"],
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 150
            while sleeper.poll() is None and not pids_in(name):
                assert time.monotonic() < deadline
            with Cluster(hosts=1):
                assert namespaces.existing(name) == []
                assert sleeper.wait(timeout=150) != 0
                assert output(alive, 0, ["hostname"]).strip() == "emulated-0"
        finally:
            sleeper.kill()
            sleeper.wait()

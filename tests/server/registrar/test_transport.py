"""Workers that meet through the registrar: collectives, also without those who are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

from farandole.comm import Group
from farandole.errors import CommError, UserError
from farandole.server.client.store import Store
from farandole.server.cluster import Cluster
from farandole.server.registrar.transport import RegistrarTransport
from farandole.sync import Downpour, Server, Strategy
from farandole.topology import Topology
from farandole.train import Run
from farandole.train.settings import Settings

T = TypeVar("T")
SECONDS = 20.0


def meet(
    size: int, body: Callable[[Group, Cluster], T], servers: int = 1
) -> dict[int, T | Exception]:
    """What `body` returned or raised on each rank, with servers in threads."""
    ends: dict[int, T | Exception] = {}
    stores: list[Store] = []

    def work(rank: int, cluster: Cluster) -> None:
        try:
            store = Store(cluster.address, cluster.key_file, rank=rank, timeout=SECONDS)
            stores.append(store)
            transport = RegistrarTransport(store, rank, size, timedelta(seconds=SECONDS))
            ends[rank] = body(Group(transport), cluster)
        except Exception as error:
            ends[rank] = error

    with Cluster(in_threads=True, servers=servers, workers=size) as cluster:
        threads = [threading.Thread(target=work, args=(rank, cluster)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for store in stores:
            store.close()
    return ends


def test_collectives() -> None:
    ops = {"sum": 6.0, "average": 2.0, "min": 1.0, "max": 3.0}

    def body(group: Group, _: Cluster) -> None:
        mine = group.rank + 1
        for op, expected in ops.items():
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
                if op == "average" and dtype == torch.int64:
                    continue
                tensor = torch.full((3, 2), mine, dtype=dtype).T  # not contiguous
                assert group.all_reduce(tensor, op) is tensor  # type: ignore[arg-type]
                assert torch.equal(tensor, torch.full((2, 3), expected, dtype=dtype)), op
        turned = group.all_reduce(torch.tensor([1j * mine, 2]))
        assert turned.tolist() == [6j, 6]

        gathered = group.all_gather(torch.full((group.rank, 2), mine))
        assert [tensor.shape for tensor in gathered] == [(0, 2), (1, 2), (2, 2)]
        assert [tensor.sum().item() for tensor in gathered] == [0, 4, 12]
        assert [one.item() for one in group.all_gather(torch.tensor(mine))] == [1, 2, 3]

        for dtype in (torch.bool, torch.float16, torch.complex128):
            flags = torch.tensor([mine == 2, True], dtype=dtype)
            assert group.broadcast(flags, 1).tolist() == [1, 1]
        assert group.broadcast(torch.zeros(0), 2).numel() == 0
        assert group.broadcast_json({"from": group.rank}, 2) == {"from": 2}
        assert group.gather_json([group.rank] * mine) == [[0], [1, 1], [2, 2, 2]]
        group.barrier()

        rows = group.reduce_scatter(torch.arange(10.0).view(5, 2))
        tripled = torch.arange(0.0, 30.0, 3.0).view(5, 2)
        assert torch.equal(rows, [tripled[:1], tripled[1:3], tripled[3:]][group.rank])

    assert meet(3, body) == {0: None, 1: None, 2: None}


def test_a_rank_that_is_gone_is_missed() -> None:
    def body(group: Group, cluster: Cluster) -> None:
        group.barrier()
        if group.rank == 1:
            cluster.lost(1)  # it never says goodbye
            return
        assert group.all_reduce(torch.tensor([group.rank + 1.0])).tolist() == [4.0]
        assert group.all_reduce(torch.tensor([group.rank + 1.0]), "average").tolist() == [2.0]
        assert group.gather_json(f"rank {group.rank}") == ["rank 0", "rank 0", "rank 2"]
        shapes = [tensor.shape for tensor in group.all_gather(torch.ones(group.rank + 1))]
        assert shapes == [(1,), (1,), (3,)]
        assert group.broadcast_json(group.rank, 2) == 2
        group.barrier()

    assert meet(3, body) == {0: None, 1: None, 2: None}


def test_one_that_is_lost_before_it_comes_is_not_waited_for() -> None:
    def body(group: Group, cluster: Cluster) -> float:
        if group.rank == 0:
            cluster.lost(2)
        total = group.all_reduce(torch.tensor([1.0]))
        return float(total)

    ends = meet(3, body)
    assert (ends[0], ends[1]) in [(2.0, 2.0), (3.0, 3.0)]  # rank 2 may have come before
    if ends[0] == 2.0:
        assert isinstance(ends[2], CommError)
        assert "rank 2 was given up by the registrar" in str(ends[2])


def test_what_a_rank_that_is_gone_had_to_say_is_missing() -> None:
    def body(group: Group, cluster: Cluster) -> None:
        group.barrier()
        if group.rank == 1:
            cluster.lost(1)
        else:
            group.broadcast(torch.zeros(2), source=1)

    ends = meet(3, body)
    for rank in (0, 2):
        assert isinstance(ends[rank], CommError)
        assert f"broadcast failed on rank {rank} of 3: rank 1 has died" in str(ends[rank])


def test_one_that_dies_in_the_middle_of_a_gather() -> None:
    """It has said how much it would give. Nobody has anything of that length in its place."""

    def body(group: Group, cluster: Cluster) -> None:
        if group.rank == 1:
            group.transport.share("all_gather(int64 [5])")
            cluster.lost(1)
            return
        with pytest.raises(CommError, match=r"all_gather failed.*rank 1 died after saying"):
            group.all_gather(torch.zeros(group.rank, dtype=torch.int64))
        assert group.gather_json(group.rank) == [0, 0, 2]  # it can still be used

    assert meet(3, body) == {0: None, 1: None, 2: None}


def test_different_claims_are_everybodys_error() -> None:
    def body(group: Group, _: Cluster) -> list[str]:
        said = []
        with pytest.raises(CommError) as caught:
            group.all_reduce(torch.zeros(2 + group.rank // 2))
        said.append(str(caught.value))
        with pytest.raises(CommError) as caught:
            group.barrier() if group.rank else group.all_reduce(torch.zeros(2))
        said.append(str(caught.value))
        with pytest.raises(CommError) as caught:
            group.all_gather(torch.zeros(2, dtype=[torch.int64, torch.float32][group.rank % 2]))
        said.append(str(caught.value))
        assert group.gather_json(group.rank) == [0, 1, 2]  # it can still be used
        return said

    for said in meet(3, body).values():
        assert isinstance(said, list)
        assert "rank 0 calls all_reduce(float32 (2,)" in said[0]
        assert "rank 2 calls all_reduce(float32 (3,)" in said[0]
        assert "rank 1 calls barrier()" in said[1]
        assert "int64" in said[2]
        assert "float32" in said[2]


def test_what_only_neighbours_could_do_is_refused() -> None:
    def body(group: Group, _: Cluster) -> None:
        with pytest.raises(UserError, match=r"\(--servers\) form no subgroups.*without --servers"):
            group.subgroup([0, 1])
        with pytest.raises(UserError, match=r"\(--servers\) send nothing to one another"):
            group.send(torch.zeros(1), 1 - group.rank)
        with pytest.raises(UserError, match="send nothing to one another"):
            group.all_reduce(torch.zeros(8), algorithm="ring")
        group.barrier()

    assert meet(2, body) == {0: None, 1: None}


@pytest.mark.parametrize("sync", [Server(), Downpour()])
def test_there_is_one_model(sync: Strategy, tmp_path: Path) -> None:
    """Not a hang: its clocks count the steps of the first."""

    def body(group: Group, _: Cluster) -> str:
        settings = Settings(sync=sync, name="x", folder=tmp_path, script="x")
        run = Run(group, Topology.single(2), torch.device("cpu"), settings=settings)
        models = nn.Linear(2, 2), nn.Linear(2, 2)
        run.distribute(models[0], torch.optim.SGD(models[0].parameters(), 0.1))
        with pytest.raises(UserError) as caught:
            run.distribute(models[1], torch.optim.SGD(models[1].parameters(), 0.1))
        return str(caught.value)

    for said in meet(2, body, servers=2).values():
        assert str(said).startswith("a job under parameter servers (--servers) trains one model")

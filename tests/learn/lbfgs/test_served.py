"""L-BFGS with its vectors on parameter servers: the same minimum, also if workers are killed and
late ones put what nobody waits for any more."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farandole.errors import UserError
from farandole.learn import LBFGS
from farandole.learn.lbfgs.served_vectors import ServedVectors
from farandole.learn.lbfgs.vectors import LocalVectors
from farandole.learn.pools.here import Here
from farandole.server import Cluster, Store
from tests.support.signalled import Signalled

generator = torch.Generator().manual_seed(0)
X = torch.randn(97, 6, generator=generator, dtype=torch.float64)
Y = (X @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3).double()


def test_vectors_on_servers_do_what_vectors_here_do() -> None:
    random = np.random.default_rng(0)
    with (
        Cluster(servers=2, in_threads=True) as cluster,
        Store(cluster.address, cluster.key_file) as store,
    ):
        length = 300_001  # in several ranges
        ours, theirs = LocalVectors(4, length), ServedVectors(store, "v", 4, length)
        for place in range(4):
            values = random.normal(size=length)
            for vectors in (ours, theirs):
                vectors.put(place, values)
        for vectors in (ours, theirs):
            vectors.combine({0: {1: 2.0, 2: -0.3}, 1: {0: 1.0}, 3: {3: 0.5, 0: 1e-3, 2: 7.0}})
        for place in range(4):
            assert np.array_equal(ours.get(place), theirs.get(place))
        pairs = [(0, 0), (0, 3), (2, 1)]
        assert theirs.dots(pairs) == pytest.approx(ours.dots(pairs), rel=1e-10)
        assert theirs.dots([]) == []


def test_a_put_that_is_late_changes_nothing() -> None:
    with (
        Cluster(servers=1, in_threads=True) as cluster,
        Store(cluster.address, cluster.key_file) as store,
    ):
        store.create("v", 3, dtype="float64", rule="vectors:count=2")

        def put(value: float, stamp: int) -> list[float]:
            values = torch.full((3,), value, dtype=torch.float64)
            store.start_put("v", values, slot=1, stamp=stamp).wait()
            found: torch.Tensor = store.start_get("v", slot=1).wait()
            return found.view(-1).tolist()

        assert put(1.0, 5) == [1.0] * 3
        assert put(2.0, 4) == put(2.0, 5) == [1.0] * 3
        assert put(3.0, 6) == [3.0] * 3
        assert put(4.0, 0) == [4.0] * 3


@pytest.mark.filterwarnings("ignore:not converged after 3")
def test_the_same_minimum_with_a_worker_killed_and_one_stopped(tmp_path: Path) -> None:
    expected = LBFGS(F.cross_entropy, linear(), pool=Here(1), max_iter=3, tolerance=0, pieces=8)
    expected.fit(X, Y)
    model = Signalled(linear(), tmp_path, [signal.SIGKILL, signal.SIGSTOP])
    with Cluster(servers=1, in_threads=True) as cluster:
        found = LBFGS(
            F.cross_entropy, model, pool=3, servers=cluster, max_iter=3, tolerance=0, pieces=8
        ).fit(X, Y)
    assert found.n_iter_ == 3
    for ours, theirs in zip(model.parameters(), expected.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    # Neither parameters nor gradients go through the coordinator.
    assert found.report_.bytes_moved < 8 * 100 * len(found.report_.passes)


def test_what_servers_cannot_be_for() -> None:
    with ThreadPoolExecutor(2) as threads:
        for pool in (None, threads):
            optimizer = LBFGS(F.cross_entropy, linear(), pool=pool, servers=("127.0.0.1:1", "key"))
            with pytest.raises(UserError, match=r"servers= is for a pool .*give pool=NUMBER"):
                optimizer.fit(X, Y)

"""Random draws that the database has no samples of: with equal seeds, the plain call's, or refused.

Shards in processes begin each block with the same random state; see `apart`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal

from tests.layout.oracle.calls import Found
from tests.layout.oracle.database import Given
from tests.layout.oracle.verdicts import EXACT, REFUSED, WHOLE, expected, verdict
from tests.layout.oracle.ways import WAYS
from tests.layout.tiles.checks import numbers

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1, hard=True),
    "gumbel, along the image": lambda x: F.gumbel_softmax(x, tau=0.5),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 3.0), x.detach().sigmoid()),
    "Tensor.bernoulli": lambda x: x * x.detach().bernoulli(0.3),
    "rand of a shape": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "one number for all": lambda x: x * torch.rand(()),
    "one for each sample": lambda x: x * torch.rand(x.shape[0], 1, 1, 1),
    "new, then drawn": lambda x: x + x.new_empty(x.shape).normal_(),
    "like, then drawn": lambda x: x + torch.empty_like(x).exponential_(),
    "randperm of samples": lambda x: x[torch.randperm(x.shape[0])],
    "randperm of channels": lambda x: x[:, torch.randperm(x.shape[1])],
    "a place, drawn": lambda x: x[:, :, torch.randint(3, ()).item() :],
    "Normal.rsample": lambda x: Normal(x, x.abs() + 1).rsample(),
    "rrelu": lambda x: torch.rrelu(x, training=True),
    "several": lambda x: F.dropout(x * torch.rand_like(x)) + F.dropout2d(x).tanh(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_one_process(name: str) -> None:
    call, given = DRAWS[name], Given((numbers(4, 4, 6, 6).requires_grad_(),), {})
    with torch.random.fork_rng(devices=[]):
        true = expected(call, given)
        found = {verdict(call, given, way, true, {""}) for way in WAYS}
    assert isinstance(true, Found), true
    assert found <= {EXACT, WHOLE} | ({REFUSED} if name == "like, then drawn" else set())

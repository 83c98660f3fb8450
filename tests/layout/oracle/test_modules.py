"""Every module of PyTorch's own database: exact, whole, or refused; in training and evaluation.

As for operators, and with the gradients of the weights and the buffers after the call.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from tests.layout.oracle import coverage
from tests.layout.oracle.database import Given, is_batch, module_cases, modules
from tests.layout.oracle.verdicts import WrongError, expected, verdict
from tests.layout.oracle.ways import WAYS

pytestmark = [pytest.mark.needs("expecttest"), pytest.mark.filterwarnings("ignore")]
CHUNKS = 4
ALONE = [way for way in WAYS if not way.together]  # weights are no batches


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_modules(chunk: int) -> None:
    found = {}
    wrong: list[str] = []
    with torch.random.fork_rng(devices=[]):
        for info in modules()[chunk::CHUNKS]:
            verdicts = defaultdict(set)
            for training in (True, False):
                for module, given, description in module_cases(info, training):
                    if not _is_for_tiles(given):
                        continue
                    called, bare = _called(module, given)
                    true = expected(called, bare)
                    for way in ALONE:
                        try:
                            each = verdict(called, bare, way, true, _names(module))
                        except WrongError as error:
                            what = f"{info.name} ({description}, training={training})"
                            wrong.append(f"{what} on {way.name}: {error}"[:600])
                        else:
                            if not isinstance(true, Exception):
                                verdicts[way.name].add(each)
            if verdicts:
                found[info.name] = {way: frozenset(each) for way, each in verdicts.items()}
    assert not wrong, "\n".join(wrong)
    coverage.check("Modules", found)


def _is_for_tiles(given: Given) -> bool:
    tensors = [each for each in pytree.tree_leaves(tuple(given)) if isinstance(each, Tensor)]
    return bool(tensors) and is_batch(tensors[0])


def _called(module: nn.Module, given: Given) -> tuple[Callable[..., Any], Given]:
    """The module as a function of its inputs, its weights and its buffers: so all of them are
    compared, and none is changed from one call to the next. Weights come last."""
    weights = {name: each.detach().requires_grad_() for name, each in module.named_parameters()}
    buffers = dict(module.named_buffers())

    def call(*args: Any, weights: Any, buffers: Any, **kwargs: Any) -> Any:
        own = copy.deepcopy(module)  # some keep what they have seen last
        return torch.func.functional_call(own, {**weights, **buffers}, args, kwargs)

    return call, Given(given.args, {**given.kwargs, "weights": weights, "buffers": buffers})


def _names(module: nn.Module) -> set[str]:
    return {type(module).__name__, "in place", "BatchNorm"}

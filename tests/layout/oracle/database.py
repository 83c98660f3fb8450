"""PyTorch's own database of operators and modules, with sample inputs that nobody here wrote.

`torch.testing._internal` belongs to PyTorch's own tests: to import it takes `expecttest`, and it
changes settings of the process, which are put back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

SAMPLES = 4  # of every operator
VARIANT_SAMPLES = 2  # of its method, its operator and what changes a tensor in place
MODULE_SAMPLES = 3  # in training and in evaluation
LOOKED_AT = 40  # for samples that differ in more than their sizes
LARGEST = 10_000  # elements of the tensors of a sample together


class Given(NamedTuple):
    """The arguments of one call. No tensor of them is changed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Case(NamedTuple):
    """A call of one form of an operator: its function, its method, in place…"""

    operator: str
    form: str
    call: Callable[..., Any]
    given: Given

    def __str__(self) -> str:
        shown = pytree.tree_map_only(
            Tensor, lambda each: f"{str(each.dtype)[6:]}{list(each.shape)}", tuple(self.given)
        )
        return f"{self.operator} ({self.form}) of {shown}"


@functools.cache
def operators() -> dict[str, Any]:
    """All that run on a CPU, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    _look_for_no_test_case()
    return {name_of(each): each for each in op_db if each.dtypes}


@functools.cache
def modules() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    _look_for_no_test_case()
    return [each for each in module_db if not each.is_lazy]  # which become others in the end


def _look_for_no_test_case() -> None:
    """For every sample, the database looks for PyTorch's own test case on the stack, and for the
    source of every frame. That takes as long as all else here, and there is no such test case."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        module.extract_test_fn = lambda: None


def name_of(operator: Any) -> str:
    variant: str = operator.variant_test_name
    return f"{operator.name}, {variant}" if variant else operator.name


def cases(operator: Any) -> Iterator[Case]:
    """Calls of all forms of an operator, with a batch of something."""
    kind = _kind(operator.dtypes)
    torch.manual_seed(1)
    found = operator.sample_inputs("cpu", kind, requires_grad=_differentiable(operator, kind))
    samples = _different(islice(_tried(found), LOOKED_AT))
    for form, call in _forms(operator).items():
        for sample in samples[: SAMPLES if form == "function" else VARIANT_SAMPLES]:
            yield Case(name_of(operator), form, call, sample)


def wrong_cases(operator: Any) -> Iterator[Case]:
    """Calls that PyTorch's own tests expect to be refused."""
    if operator.error_inputs_func is None:
        return
    torch.manual_seed(1)
    for wrong in islice(_tried(operator.error_inputs("cpu")), SAMPLES):
        given = _given(wrong.sample_input)
        if _has_batch(given):
            yield Case(name_of(operator), "refused", operator.op, given)


def _kind(kinds: Any) -> torch.dtype:
    preferred = (torch.float64, torch.int64, torch.float32, torch.bool)
    return next((kind for kind in preferred if kind in kinds), None) or min(kinds, key=str)


def _differentiable(operator: Any, kind: torch.dtype) -> bool:
    return bool(operator.supports_autograd and kind.is_floating_point)


def _forms(operator: Any) -> dict[str, Callable[..., Any]]:
    found = {
        "function": operator.op,
        "method": operator.method_variant,
        "operator": operator.operator_variant,
        "in place": operator.inplace_variant,
        "operator in place": operator.inplace_operator_variant,
    }
    for alias in operator.aliases:
        found[f"alias {alias.name}"] = alias.op
    return {form: call for form, call in found.items() if call is not None}


def _given(sample: Any) -> Given:
    return Given((sample.input, *sample.args), dict(sample.kwargs))


def _tried(samples: Any) -> Iterator[Any]:
    """As many as can be made: some need what is not on every machine."""
    while True:
        try:
            yield next(samples)
        except StopIteration:
            return
        except Exception:  # of the database's own code
            return


def _different(samples: Iterator[Any]) -> list[Given]:
    """Those with a batch; first one for each way to be called, then the others."""
    seen: set[Any] = set()
    first, rest = [], []
    for sample in samples:
        given = _given(sample)
        if not _has_batch(given):
            continue
        spelling = pytree.tree_map(_spelling, (given.args, sorted(given.kwargs.items())))
        key = str(spelling)
        (rest if key in seen else first).append(given)
        seen.add(key)
    return first + rest


def _spelling(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dim()
    return type(leaf).__name__ if isinstance(leaf, (int, float)) else leaf


def _has_batch(given: Given) -> bool:
    tensors = [each for each in pytree.tree_leaves(tuple(given)) if isinstance(each, Tensor)]
    small = sum(each.numel() for each in tensors) <= LARGEST
    return bool(tensors) and small and is_batch(tensors[0])


def is_batch(tensor: Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.shape[0] >= 1 and tensor.layout == torch.strided


def module_cases(info: Any, training: bool) -> Iterator[tuple[nn.Module, Given, str]]:
    """Modules in double precision and the arguments of their forward."""
    torch.manual_seed(1)
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    for each in islice(made, MODULE_SAMPLES):
        build = each.constructor_input
        module = info.module_cls(*build.args, **build.kwargs).double().train(training)
        forward = each.forward_input
        yield module, Given(tuple(forward.args), dict(forward.kwargs)), each.desc

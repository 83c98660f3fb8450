"""`hvd.DistributedOptimizer`: an optimizer whose gradients are those of all ranks.

The optimizer that is given keeps its class, so that schedulers and `isinstance` go on working: what
is returned is of a subclass of it, and shares its parameters, groups and state. Each gradient is
asked for as soon as the backward pass has made it, and waited for in `step`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.errors import UserError
from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.adasum_optimizer import AdasumSteps
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.gradients import Gradients
from farandole.horovod.torch.operations import Adasum, Average, ReduceOp, chosen_op

_SYNCHRONIZED_TWICE = (  # in Horovod's words, since scripts filter it by them
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)


class _Distributed:
    """What is added to the optimizer's own class."""

    _gradients: Gradients
    _parameter_names: dict[nn.Parameter, str]
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Waits until the gradients of all ranks are there. `step` does it, unless told not to."""
        self._gradients.wait()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not synchronize: it was done before, to clip gradients, say."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on so many backward passes add up before gradients are sent."""
        self._gradients.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
            if closure is None:
                self._gradients.wait()
            else:
                closure = self._then_waiting(closure)
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def _then_waiting(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure makes the gradients, as often as the optimizer likes."""

        def with_all_ranks() -> Any:
            loss = closure()
            self._gradients.wait()
            return loss

        return with_all_ranks

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._gradients.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward(), but before "
                "optimizer.step() or optimizer.synchronize(): gradients are under way. If they are "
                "to be thrown away, as those of a discriminator through which a generator was "
                "trained, call optimizer.synchronize() first, on all ranks."
            )
        self._synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        added = _last_group(self)
        self._parameter_names.update(added)
        self._gradients.add(_trained(added))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also forgets gradients under way, of a step that failed."""
        self._gradients.forget()
        self._synchronized = False
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


class _DistributedAdasum:
    """The same for Adasum, which combines the steps that the ranks have taken."""

    _steps: AdasumSteps
    _parameter_names: dict[nn.Parameter, str]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """The gradients of so many backward passes add up, on this rank, until `step` is called."""
        _check_passes(passes)

    def synchronize(self) -> None:
        """Nothing is sent before the step."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        raise AssertionError("with Adasum nothing is synchronized before the step.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        added = _last_group(self)
        self._parameter_names.update(added)
        self._steps.add(_trained(added))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with self._steps.combined():
            return super().step(closure)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`optimizer`, as one that steps by the gradients of all ranks.

    `named_parameters` gives names to what is sent; without it numbers do. Gradients of
    `backward_passes_per_step` backward passes add up before they are sent. They are divided by
    `gradient_predivide_factor` before they are summed, and by the rest of what makes an average
    after. `groups` (lists of parameters, or a number of them) are sent together, each in one go.
    Gradients that are sparse are sent as such, or with `sparse_as_dense` as dense ones, which they
    stay unless the optimizer is `SparseAdam`. With `op=hvd.Adasum` the ranks' steps are combined,
    not their gradients.
    """
    chosen = chosen_op(None, op)
    _check_arguments(
        optimizer, chosen, gradient_predivide_factor, backward_passes_per_step, process_set
    )
    if num_groups:
        warnings.warn(
            "num_groups is Horovod's old name; use groups=…", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    all_names = _names(optimizer, named_parameters)
    names = _trained(all_names)
    if chosen == Adasum:
        if groups is not None:
            raise UserError("groups are for gradients; Adasum sends steps, each by itself.")
        own = _as_subclass(optimizer, _DistributedAdasum)
        own._steps = AdasumSteps(names, compression, process_set)
        own._parameter_names = all_names
        return own
    own = _as_subclass(optimizer, _Distributed)
    own._parameter_names = all_names  # by Horovod's name: scripts look into it
    own._synchronized, own._should_synchronize = False, True
    own._gradients = Gradients(
        names,
        _groups(groups, names),
        compression=compression,
        passes=backward_passes_per_step,
        op=chosen,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        steps_by_sparse=isinstance(optimizer, torch.optim.SparseAdam),
        process_set=process_set,
    )
    return own


def _as_subclass(optimizer: Optimizer, addition: type) -> Any:
    """The same optimizer, with methods added. It shares everything with the one given."""
    kind = type(optimizer)
    own: Any = object.__new__(type(kind.__name__, (addition, kind), {}))
    # A scheduler made before this has put a `step` of its own in front, for the old object. It goes
    # on asking that one whether it has stepped, and would warn that it has not.
    own.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return own


def _last_group(optimizer: Any) -> dict[nn.Parameter, str]:
    """The parameters of a group that was added later: they go by numbers."""
    number = len(optimizer.param_groups) - 1
    params = optimizer.param_groups[number]["params"]
    return {p: f"added.{number}.{j}" for j, p in enumerate(params)}


def _trained(names: dict[nn.Parameter, str]) -> dict[nn.Parameter, str]:
    return {p: name for p, name in names.items() if p.requires_grad}


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise UserError(f"backward_passes_per_step={passes} must be 1 or more.")


def _check_arguments(
    optimizer: Optimizer, op: ReduceOp, predivide: float, passes: int, process_set: ProcessSet
) -> None:
    session.current().ranks_of(process_set)
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer.")
    if isinstance(optimizer, (_Distributed, _DistributedAdasum)):
        raise UserError("this optimizer is a DistributedOptimizer already.")
    if predivide != 1.0 and op != Average:
        raise UserError(
            f"gradient_predivide_factor={predivide} divides an average in two steps; op is {op}."
        )
    if predivide <= 0:
        raise UserError(f"gradient_predivide_factor={predivide} must be above 0.")
    _check_passes(passes)


def _names(
    optimizer: Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[nn.Parameter, str]:
    """Every parameter's name, which no other one has."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {
            p: f"parameter.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UserError(
            "named_parameters should be pairs of a name and a parameter, as "
            "model.named_parameters() makes them."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise UserError(f"named_parameters has several of the name {', '.join(twice)}.")
    by_parameter = {id(p): name for name, p in pairs}
    unnamed = [p for p in params if id(p) not in by_parameter]
    if unnamed:
        raise UserError(
            f"named_parameters was given, but {len(unnamed)} of the optimizer's {len(params)} "
            f"parameters are not in it; the first has the shape {tuple(unnamed[0].shape)}. Name "
            "all of them, or leave named_parameters out."
        )
    return {p: by_parameter[id(p)] for p in params}


def _groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, names: dict[nn.Parameter, str]
) -> list[list[nn.Parameter]]:
    """Parameters that are sent together. A number of groups are made as even as they can be."""
    if groups is None:
        return []
    params = list(names)
    if isinstance(groups, int):
        if groups < 0:
            raise UserError(f"groups={groups} must be 0 or more.")
        count = min(groups, len(params))
        bounds = [len(params) * i // count for i in range(count + 1)] if count else []
        return [params[a:b] for a, b in itertools.pairwise(bounds)]
    known = {id(p): p for p in params}
    found: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, (list, tuple)):
            raise UserError("groups should be a number, or a list of lists of parameters.")
        chosen = [known[id(p)] for p in group if id(p) in known]
        if seen & {id(p) for p in chosen}:
            raise UserError("a parameter stands in several groups.")
        seen |= {id(p) for p in chosen}
        if chosen:
            found.append(chosen)
    return found

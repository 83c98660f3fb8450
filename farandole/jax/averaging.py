"""`fd.jax.average`: parameters of a JAX model, kept in step by any strategy.

average = fd.jax.average(params)             # --sync wins over sync=…
params = average.params                      # rank 0's
grads = average.gradients(grads)             # averages, where the strategy averages gradients
params = average.step(params)                # after the update: averages, where it does models
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import io_callback

from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import CheckpointError, UserError
from farandole.jax.collectives import require_one_device
from farandole.jax.optimizer_state import OptimizerState
from farandole.jax.saving import from_saved, to_saved
from farandole.jax.trees import Tree, is_traced, taken_apart
from farandole.sync import PostLocal, Strategy
from farandole.train.current_run import current
from farandole.train.mirror.mirror import Mirror
from farandole.train.mirror.rules import read_strategy

Rate = float | Callable[[int], float]


class Average:
    """A strategy at work on one tree of parameters. All ranks call every method together.

    `gradients` and `step` work in and out of `jit`; call `step` once after every update.
    """

    def __init__(self, params: Any, state: Any, strategy: Strategy, rate: Rate | None) -> None:
        values, self._tree = taken_apart(params, "params")
        if is_traced(values):
            raise UserError("fd.jax.average is called outside of jit, with the parameters.")
        self._run = run = current()
        self.strategy = strategy
        self._rate = rate
        self._steps = 0
        self._slots = OptimizerState()
        tensors = [from_buffer(value) for value in values]
        named = dict(zip(self._tree.names, tensors, strict=True))
        self._trained = [name for name, value in named.items() if _is_trained(value)]
        self._mirror = Mirror(
            run,
            strategy,
            {name: named[name] for name in self._trained},
            frozen={name: value for name, value in named.items() if not _is_trained(value)},
            slots=self._slots.read(state),
            rate=self._rate_now(),
        )

    @property
    def moved(self) -> bool:
        """Whether `params` are others than those that the script has: at the start, after an epoch
        or a load, and where a strategy enters a new phase."""
        jax.effects_barrier()
        return self._mirror.moved

    @property
    def params(self) -> Any:
        """Those to go on with: rank 0's at the start, and what a checkpoint held after a load."""
        jax.effects_barrier()
        return self._tree.rebuild([jnp.array(value) for value in self._ordered()])

    def latest(self, state: Any) -> tuple[Any, Any]:
        """`params`, and the optimizer's state to go on with where one is averaged: `state` holds
        the counters, which are not."""
        self._slots.take(state)
        params, known = self.params, self._mirror.slots()
        arrays = [jnp.array(to_array(known[name])) for name in self._slots.names]
        return params, self._slots.put(state, arrays)

    def gradients(self, grads: Any) -> Any:
        """The gradients to apply: averages under strategies that average gradients.

        Weighs them by the size of this rank's batch, and stops all ranks with a `DivergedError`
        where one is not finite. Leaves that are not floating-point numbers stay as they are.
        """
        values, tree = taken_apart(grads, "grads")
        self._require_same(tree, "grads")
        at = [tree.names.index(name) for name in self._trained]
        averaged = self._call(self._average_gradients, [values[index] for index in at])
        for index, value in zip(at, averaged, strict=True):
            values[index] = value
        return tree.rebuild(values)

    def step(self, params: Any, state: Any = None) -> Any:
        """The parameters to go on with after an update: where ranks meet, their average.

        With a `state`, as it was given to `fd.jax.average`, the pair of both.
        """
        values, tree = taken_apart(params, "params")
        self._require_same(tree, "params")
        slots = self._slots.take(state)
        results = self._call(self._take_step, [*values, *slots])
        params = tree.rebuild(results[: len(values)])
        if state is None:
            return params
        return params, self._slots.put(state, results[len(values) :])

    # Checkpoints

    def save(self, *trees: Any, **options: Any) -> Path | str:
        """Saves the run with these parameters, and `trees` such as the optimizer's state.

        `options` are those of `run.save`. Every rank saves together; rank 0 writes its trees.
        Raises `CheckpointError` on every rank when it could not be written whole.
        """
        jax.effects_barrier()
        saved = {"steps": self._steps, "trees": [to_saved(tree) for tree in trees]}
        return self._run.save(**options, jax=saved)

    def load(self, *like: Any, path: str | Path | None = None) -> tuple[Any, ...] | None:
        """Goes on from the newest checkpoint, as `run.load` does; None if there is none.

        Returns the parameters, and trees in the structures of `like`.
        """
        state = self._run.load(path)
        if state is None:
            return None
        saved = state.get("jax")
        if saved is None or len(saved["trees"]) != len(like):
            held = "no trees" if saved is None else f"{len(saved['trees'])} trees"
            raise CheckpointError(
                f"the checkpoint holds {held} beside the parameters, and {len(like)} are to be "
                "loaded: save and load the same ones."
            )
        self._steps = saved["steps"]
        trees = [from_saved(one, tree) for one, tree in zip(saved["trees"], like, strict=True)]
        return self.params, *trees

    # On the host

    def _call(self, on_host: Callable[..., list[Any]], values: list[Any]) -> list[Any]:
        if not is_traced(values):
            jax.effects_barrier()
            return [jnp.array(value) for value in on_host(*values)]
        require_one_device()
        results = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
        called: list[Any] = io_callback(on_host, results, *values, ordered=True)
        return called

    def _average_gradients(self, *values: Any) -> list[Any]:
        averaged = self._mirror.gradients([from_buffer(value) for value in values])
        kinds = [from_buffer(value).dtype for value in values]
        return [to_array(g.to(kind)) for g, kind in zip(averaged, kinds, strict=True)]

    def _take_step(self, *values: Any) -> list[Any]:
        tensors = [from_buffer(value) for value in values]
        count = len(self._tree.leaves)
        named = dict(zip(self._tree.names, tensors[:count], strict=True))
        slots = dict(zip(self._slots.names, tensors[count:], strict=True))
        frozen = [name for name in named if name not in self._trained]
        self._mirror.optimizer.set_rate(self._rate_now())
        self._steps += 1
        self._mirror.step([named[name] for name in (*self._trained, *frozen)], slots)
        known = self._mirror.slots()
        return [*self._ordered(), *(to_array(known[name]) for name in self._slots.names)]

    def _ordered(self) -> list[Any]:
        """The values in the order of the tree: those of the mirror begin with the trained ones."""
        frozen = [name for name in self._tree.names if name not in self._trained]
        named = dict(zip((*self._trained, *frozen), self._mirror.values(), strict=True))
        return [to_array(named[name]) for name in self._tree.names]

    def _rate_now(self) -> float:
        if self._rate is None:
            return 1.0
        return float(self._rate(self._steps) if callable(self._rate) else self._rate)

    def _require_same(self, tree: Tree, what: str) -> None:
        if tree.structure == self._tree.structure and _shapes(tree) == _shapes(self._tree):
            return
        known, given = dict(_shapes(self._tree)), dict(_shapes(tree))
        for name in (*known, *given):
            if known.get(name) != given.get(name):
                raise UserError(
                    f"{what}: {name!r} is {given.get(name, 'missing')} here, and was "
                    f"{known.get(name, 'missing')} in the parameters given to fd.jax.average."
                )
        raise UserError(
            f"{what}: the tree is {tree.structure}, and that of the parameters given to "
            f"fd.jax.average was {self._tree.structure}."
        )


def average(
    params: Any,
    state: Any = None,
    *,
    sync: Strategy | str | None = None,
    rate: Rate | None = None,
) -> Average:
    """*Together.* Keeps the ranks' `params` in step by a strategy: the command line's `--sync`, or
    `sync` (such as `"local:every=8"`), or all-reduce. All ranks start from rank 0's.

    `state` is the optimizer's, such as `optimizer.init(params)`: strategies that average it need
    it, `daso` among them; it then goes through every `step`. `rate` is the learning rate, a number
    or a schedule of optax, for the strategies that follow it.
    Raises `UserError` for a strategy that needs a torch model, and for `postlocal` without a rate
    to follow; `ModelMismatchError`, naming the leaf, if the ranks' trees differ.
    """
    strategy = read_strategy(current().settings, sync, "JAX", slots=state is not None)
    if isinstance(strategy, PostLocal) and strategy.at is None and not callable(rate):
        raise UserError(
            "postlocal waits for the learning rate to fall: pass fd.jax.average(…, rate=schedule), "
            "with optax's schedule, or say when: postlocal:at=0.3."
        )
    return Average(params, state, strategy, rate)


def _is_trained(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _shapes(tree: Tree) -> Sequence[tuple[str, tuple[int, ...]]]:
    return [(name, shape) for name, shape, _ in tree.leaves]

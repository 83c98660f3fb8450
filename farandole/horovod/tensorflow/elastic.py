"""`hvd.elastic`: training that goes on when workers die, and when hosts come and go.

state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 90):
        …
        state.commit()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from farandole.errors import UserError
from farandole.horovod.common.elastic import ObjectState
from farandole.horovod.tensorflow.bridge import cause_of
from farandole.horovod.tensorflow.framework import tf
from farandole.horovod.tensorflow.functions import broadcast_object, broadcast_variables
from farandole.horovod.torch import elastic
from farandole.horovod.torch.basics import rank

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Runs `func(state, …)` again, from the state's last commit, whenever the workers change.

    A worker that has no part in it any more, because its host was removed, ends in it with 0.
    """

    @functools.wraps(func)
    def named(*args: Any, **kwargs: Any) -> Result:
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:  # what a collective of a graph raised has become this
            cause = cause_of(error)
            if cause is None:
                raise
            raise cause from error

    return elastic.run(named)


class TensorFlowState(ObjectState):
    """`TensorFlowState(variables, epoch=0, …)`: variables, and plain values as attributes."""

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None:
            raise UserError(
                "TensorFlowState(session=…): sessions of TensorFlow 1 are not supported. Leave it "
                "out, and pass variables of eager mode."
            )
        if variables is None:
            raise UserError("TensorFlowState wants variables: TensorFlow 2 keeps no list of them.")
        self._kept = list(variables)
        self._values = self._copies()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def tracked(self) -> list[Any]:
        """The variables that are part of the state, as they are now."""
        return self._kept

    def _copies(self) -> list[Any]:
        return [variable.numpy() for variable in self.tracked()]

    def save(self) -> None:
        self._values = self._copies()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.tracked(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        if self.tracked():
            broadcast_variables(self.tracked(), root_rank=0)
        self._values = self._copies()
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """`TensorFlowKerasState(model, optimizer, epoch=0, …)`: a Keras model with its optimizer."""

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        if not model.built:
            raise UserError("the model has no variables yet: call model.build(…) before the state.")
        used = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if used is not None and not used.built:
            used.build(model.trainable_variables)  # so that all ranks have the same variables
        self.model = model
        self.optimizer = used
        super().__init__(variables=_all(model, used), **kwargs)

    def tracked(self) -> list[Any]:
        return _all(self.model, self.optimizer)


def _all(model: Any, optimizer: Any) -> list[Any]:
    return [*model.variables, *(optimizer.variables if optimizer is not None else [])]

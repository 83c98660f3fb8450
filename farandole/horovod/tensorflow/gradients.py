"""The gradients of a step, averaged over all ranks: of a tape, or of an optimizer.

All dense gradients are one request, under a name made of those of their variables. So the ranks may
come to two models in different orders, and a rank that has another model is found out: nothing is
averaged that does not belong together.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.basics import size_of
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.framework import as_dense, tf, unconverted
from farandole.horovod.tensorflow.reductions import reduce_mixed
from farandole.horovod.torch.dense_reductions import Reduction
from farandole.horovod.torch.operations import Average, ReduceOp, chosen_op


@dataclass(frozen=True)
class GradientReduction:
    """How gradients are combined. `local`: variables, by `key_of`, that each rank trains alone."""

    op: ReduceOp = Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    local: set[Any] = field(default_factory=set)

    @classmethod
    def asked(
        cls,
        op: str,
        compression: type[Compressor],
        sparse_as_dense: bool,
        gradient_predivide_factor: float,
        process_set: ProcessSet,
        scale_local_gradients: bool,
        num_groups: int,
        groups: Any,
    ) -> GradientReduction:
        """From the arguments that tape and optimizer have. Raises `UserError`.

        `num_groups` and `groups` say what Horovod is to send in one go. Here all is.
        """
        chosen = chosen_op(None, op)
        if gradient_predivide_factor != 1.0 and chosen != Average:
            raise UserError(
                f"gradient_predivide_factor={gradient_predivide_factor} divides an average in two "
                f"steps; op={chosen} has none. Leave it out."
            )
        if gradient_predivide_factor <= 0:
            raise UserError(
                f"gradient_predivide_factor={gradient_predivide_factor} must be above 0."
            )
        if num_groups < 0 or not (groups is None or isinstance(groups, (int, list, tuple))):
            raise UserError(
                f"num_groups={num_groups}, groups={groups!r}: give a number of groups, or lists "
                "of variables."
            )
        return cls(
            chosen,
            compression,
            sparse_as_dense,
            gradient_predivide_factor,
            process_set,
            scale_local_gradients,
        )

    def keep_local(self, variables: Iterable[Any]) -> None:
        """These variables' gradients stay this rank's own from now on."""
        self.local.update(key_of(variable) for variable in variables)

    @unconverted
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """None stays None: all ranks must have none there."""
        reduced = list(gradients)
        if self.process_set.included() is False:
            return reduced  # this rank trains by itself
        sent = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if key_of(variable) in self.local:
                reduced[index] = self._own(gradient)
                continue
            sent.append(index)
        if sent:
            given = [reduced[index] for index in sent]
            given = [as_dense(one) for one in given] if self.sparse_as_dense else given
            # Of all variables: where a rank has no gradient that others have, the requests differ
            # under one name, which is found out at once. `without` makes them differ where the
            # shapes do not: one rank may lack a gradient, and another rank another one.
            names = [_called(variable) for variable in variables]
            dense = {i for i, one in zip(sent, given, strict=True) if not _is_sparse(one)}
            without = tuple(  # by number too: variables of TensorFlow may share a name
                f"variable {index} ({name})"
                for index, name in enumerate(names)
                if index not in dense
            )
            scales = (1.0 / self.predivide, self.predivide)
            how = Reduction(self.op, _name_of(names), scales, self.process_set, without)
            found = reduce_mixed(given, how, self.compression, "gradients", numbers=sent)
            for index, gradient in zip(sent, found, strict=True):
                reduced[index] = gradient
        return reduced

    def _own(self, gradient: Any) -> Any:
        if not self.scale_local:
            return gradient
        if _is_sparse(gradient):
            values = gradient.values / tf.cast(size_of(self.process_set), gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size_of(self.process_set), gradient.dtype)


def key_of(variable: Any) -> Any:
    """What stands for a variable: those of Keras hold one of TensorFlow's."""
    inner = getattr(variable, "value", None)
    inner = variable if inner is None or callable(inner) else inner
    return inner.ref() if hasattr(inner, "ref") else id(inner)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _called(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", "tensor"))


def _name_of(names: Sequence[str]) -> str:
    digest = zlib.crc32("\n".join(names).encode())
    return f"gradients.{names[0]}.{len(names)}.{digest:08x}"

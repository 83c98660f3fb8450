"""A gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.framework import tf, unconverted
from farandole.horovod.tensorflow.gradients import GradientReduction
from farandole.horovod.torch.operations import Average


class _Tape(tf.GradientTape):
    """Records with the tape that it was given, which may have recorded already."""

    def __init__(self, tape: Any, reduction: GradientReduction) -> None:
        # Not the base's: this one records nothing itself.
        self._wrapped = tape
        self._reduction = reduction

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self._reduction.keep_local([source])

    @unconverted
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As of `tf.GradientTape`, combined over all ranks."""
        found = self._wrapped.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(found, expand_composites=False)
        reduced = self._reduction(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def __enter__(self) -> Any:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._wrapped.__exit__(*details)

    def watch(self, tensor: Any) -> None:
        self._wrapped.watch(tensor)

    def stop_recording(self) -> Any:
        return self._wrapped.stop_recording()

    def reset(self) -> None:
        self._wrapped.reset()

    def watched_variables(self) -> Any:
        return self._wrapped.watched_variables()

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's own, as in Horovod."""
        return self._wrapped.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's own, as in Horovod."""
        return self._wrapped.batch_jacobian(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)


def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`gradtape`, whose `gradient()` combines gradients over all ranks.

    Before or after it has recorded. `register_local_source(variable)` leaves a variable's gradient
    out of it; with `scale_local_gradients` that is divided by the number of ranks.
    """
    del device_dense, device_sparse
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _Tape):
        raise UserError(
            f"DistributedGradientTape wants a tf.GradientTape, not a {type(gradtape).__name__}."
        )
    reduction = GradientReduction.asked(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        process_set,
        scale_local_gradients,
        num_groups,
        groups,
    )
    return _Tape(gradtape, reduction)


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape` in which the variables of `local_layers` stay this rank's own."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers_of(local_layers):
        for variable in layer.trainable_variables:
            tape.register_local_source(variable)
    return tape


def layers_of(given: Any) -> list[Any]:
    found = list(given) if isinstance(given, (list, tuple)) else [given] if given else []
    for layer in found:
        if not hasattr(layer, "trainable_variables"):
            raise UserError(f"local_layers has a {type(layer).__name__}, which is no Keras layer.")
    return found

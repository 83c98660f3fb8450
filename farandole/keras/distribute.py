"""`fd.keras.distribute`: a compiled Keras model, kept in step by a strategy."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import keras

from farandole.errors import UserError
from farandole.keras.callback import InStep
from farandole.keras.gradients import average_in
from farandole.keras.training import KerasTraining
from farandole.keras.weights import Weights
from farandole.sync import Strategy
from farandole.train.current_run import current
from farandole.train.mirror.rules import read_strategy

_MODELS_ONLY = ("local", "adacomm", "diloco", "federated")  # these do not look at gradients


def distribute(model: Any, sync: Strategy | str | None = None) -> Any:
    """*Together.* Keeps the ranks' models in step while `model.fit` trains them; returns `model`.

    The strategy is the command line's `--sync`, or `sync` (such as `"local:every=8"`), or
    all-reduce. All ranks start from rank 0's weights and optimizer state. Call it after `compile`,
    on a model that is built. `fit` and `evaluate` then return metrics averaged over all ranks. Each
    rank trains on the data that it is given: see `fd.keras.shard`.

    Raises `UserError` for what does not fit, by name, and `ModelMismatchError` if ranks hold
    different models.
    """
    run = current()
    _require_ready(model)
    strategy = read_strategy(run.settings, sync, "Keras")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        run.print("note: the model is not compiled by XLA, whose graphs cannot call the host")
        model.jit_compile = False
    weights = Weights(model)
    training = KerasTraining(run, strategy, model, weights)
    if strategy.name not in _MODELS_ONLY:
        average_in(model.optimizer, training.average_gradients)
    _hook_in(model, training)
    return model


def _hook_in(model: Any, training: KerasTraining) -> None:
    """`fit` gets a callback, and `evaluate` returns means over all ranks."""
    fit, evaluate = model.fit, model.evaluate

    def fit_in_step(*args: Any, **options: Any) -> Any:
        given = inspect.signature(fit).bind_partial(*args, **options).arguments
        theirs = given.pop("callbacks", None) or []
        if isinstance(theirs, keras.callbacks.CallbackList):
            raise UserError("fit(callbacks=…) wants a list of callbacks here.")
        if training.run.rank:
            given.setdefault("verbose", 0)
        ours = InStep(training, given.get("batch_size"))
        listed = theirs if isinstance(theirs, (list, tuple)) else [theirs]
        return fit(**given, callbacks=[ours, *listed])

    def evaluate_together(*args: Any, **options: Any) -> Any:
        return training.mean_of(evaluate(*args, **options))

    def refuse_batches(*args: Any, **options: Any) -> NoReturn:
        raise UserError("strategies follow fit, and not train_on_batch: call model.fit.")

    object.__setattr__(model, "fit", fit_in_step)
    object.__setattr__(model, "train_on_batch", refuse_batches)
    object.__setattr__(model, "evaluate", evaluate_together)


def _require_ready(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UserError(f"fd.keras.distribute wants a Keras model, and not {type(model).__name__}.")
    if "fit" in vars(model):
        raise UserError("this model is distributed already; call fd.keras.distribute once for it.")
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise UserError("the model has no optimizer: call model.compile(…) before distribute.")
    if not model.built or not model.trainable_variables:
        raise UserError(
            "the model has no weights yet: call model.build(input_shape), or pass a batch through "
            "it, before distribute."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise UserError(
            "mixed_float16 scales the loss, and ranks would skip different steps. Use the policy "
            "mixed_bfloat16, or compile(…, auto_scale_loss=False)."
        )
    if model.steps_per_execution != 1:
        raise UserError(
            f"steps_per_execution={model.steps_per_execution}: strategies follow every step. "
            "Leave it at 1."
        )
    if keras.distribution.distribution() is not None:
        raise UserError("keras.distribution is in use, and fd.keras.distribute does its work.")

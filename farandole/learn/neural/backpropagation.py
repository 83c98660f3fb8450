"""The loss of a network and its gradient over all rows, by back-propagation in every chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, logsumexp

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics

ACTIVATIONS = ("identity", "logistic", "tanh", "relu")
Layer = tuple[Array, Array]  # coefficients, inputs × outputs, and intercepts


def layers_of(flat: Array, sizes: tuple[int, ...]) -> list[Layer]:
    """The parameters of all layers, which stand one after the other."""
    found, at = [], 0
    for inputs, outputs in itertools.pairwise(sizes):
        coefficients = flat[at : at + inputs * outputs].reshape(inputs, outputs)
        at += inputs * outputs
        found.append((coefficients, flat[at : at + outputs]))
        at += outputs
    return found


def outputs_of(X: Any, layers: list[Layer], activation: str) -> list[Array]:
    """X, the outputs of each hidden layer, and those of the last without an activation."""
    found = [X]
    for place, (coefficients, intercepts) in enumerate(layers):
        scores = np.asarray(found[-1] @ coefficients) + intercepts
        found.append(scores if place == len(layers) - 1 else _activated(scores, activation))
    return found


def _activated(scores: Array, name: str) -> Array:
    if name == "relu":
        return np.maximum(scores, 0.0)
    if name == "tanh":
        return np.tanh(scores)
    found: Array = expit(scores) if name == "logistic" else scores
    return found


def _slope(outputs: Array, name: str) -> Array | float:
    if name == "relu":
        return (outputs > 0).astype(np.float64)
    if name == "tanh":
        return 1 - outputs**2
    return outputs * (1 - outputs) if name == "logistic" else 1.0


@dataclass(frozen=True)
class BackpropagationSum(Sum):
    """The state are all parameters, flat. `loss`: "squared", "binary" or "classes".

    The target are numbers; whether it is the second class; or the number of the class.
    """

    sizes: tuple[int, ...]
    activation: str
    loss: str

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        layers = layers_of(state, self.sizes)
        outputs = outputs_of(chunk.X, layers, self.activation)
        weight = chunk.weight[:, None]
        loss, error = self._loss(chunk, outputs[-1])
        error = error * weight
        gradients: list[Array] = []
        for place in range(len(layers) - 1, -1, -1):
            gradients += [error.sum(axis=0), np.asarray(outputs[place].T @ error).ravel()]
            if place:
                error = error @ layers[place][0].T * _slope(outputs[place], self.activation)
        return as_statistics(
            loss=(chunk.weight * loss).sum(),
            gradient=np.concatenate(gradients[::-1]),
            weight=weight.sum(),
        )

    def _loss(self, chunk: Chunk, scores: Array) -> tuple[Array, Array]:
        """Of each row, and its derivatives by the scores."""
        assert chunk.y is not None
        if self.loss == "squared":
            error = scores - chunk.y.reshape(scores.shape)
            return np.square(error).mean(axis=1) / 2, error / scores.shape[1]
        if self.loss == "binary":
            positive = chunk.y[:, None]
            return (np.logaddexp(0, scores) - positive * scores)[:, 0], expit(scores) - positive
        logs = scores - logsumexp(scores, axis=1, keepdims=True)
        rows = np.arange(chunk.rows)
        error = np.exp(logs)
        error[rows, chunk.y] -= 1
        return -logs[rows, chunk.y], error

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics

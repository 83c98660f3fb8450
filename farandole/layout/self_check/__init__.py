"""Before training, a layout is held against the plain model: loss, gradients and buffers.

A layout promises to compute what the model computes. Model code can do anything, so the promise is
tried out on every model before its first step, and a model that breaks it does not train.
"""

from farandole.layout.self_check.check import SelfCheck

__all__ = ["SelfCheck"]

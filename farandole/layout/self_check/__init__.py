"""Compares a layout with the plain model before training: loss, gradients and buffers.

A layout must compute what the model computes. Model code can do anything, so this is checked for
every model before its first step, and a model for which it does not hold is not trained.
"""

from farandole.layout.self_check.check import SelfCheck

__all__ = ["SelfCheck"]

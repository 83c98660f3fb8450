"""Weights that another framework trains, under the strategies that were written for torch models.

A strategy knows a module and an optimizer. Both are here without a computation: the module holds
copies of the weights, and the optimizer only tells the strategy that a step was taken elsewhere.
"""

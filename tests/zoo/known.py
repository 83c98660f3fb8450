"""Pairs of model and layout that are wrong, or crash, today: the one place where they are listed.

A pair that is exact or refused by now must be taken out; the tests say so.
"""

from __future__ import annotations

KNOWN: frozenset[tuple[str, str]] = frozenset(
    {
        ("VQ-VAE (auxiliary loss)", "two stages"),
        ("VQ-VAE (auxiliary loss)", "two stages, with a sample"),
        ("VQ-VAE (auxiliary loss)", "GEMS"),
        ("WaveNet", "two tiles"),
        ("WaveNet", "two stages"),
        ("WaveNet", "GEMS"),
        ("WaveNet", "zero-bubble"),
        ("mixture of experts (some unused)", "two tiles"),
        ("auxiliary loss (a number)", "two stages"),
        ("auxiliary loss (a number)", "two stages, with a sample"),
        ("moving average in a buffer", "recomputed"),
    }
)

COMPOSITIONS = True
"""Whether compositions of constructs are known to fail."""

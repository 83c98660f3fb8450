"""Where one replica of the model lives: cut into stages, on the ranks of a pipeline."""

from __future__ import annotations

from farandole.layout.layout import Layout, parse_layout

__all__ = ["Layout", "parse_layout"]

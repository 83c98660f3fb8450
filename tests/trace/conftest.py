"""Bare groups of threads, as in the tests of comm."""

from __future__ import annotations

from tests.comm.conftest import on_ranks

__all__ = ["on_ranks"]

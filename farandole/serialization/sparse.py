"""Sparse tensors, made from parts that came from elsewhere and are therefore checked.

PyTorch 2.11 and 2.12 warn at every sparse tensor until somebody has said, for the whole process,
whether they are to be checked, and do not count the argument that says it for one of them. There,
and only there, what holds anyway is said once, when this is imported.
"""

from __future__ import annotations

import warnings

import torch


def checked_sparse(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    """A COO tensor. Raises `RuntimeError` where an index does not fit into `shape`."""
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=True, is_coalesced=is_coalesced
    )


def settle_checks() -> None:
    """Says what holds, if PyTorch would warn at a tensor of which it has been said."""
    checks = torch.sparse.check_sparse_tensor_invariants
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checked_sparse(torch.empty((1, 0), dtype=torch.int64), torch.empty(0), (0,))
        if told:
            (checks.enable if checks.is_enabled() else checks.disable)()


settle_checks()

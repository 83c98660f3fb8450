"""What became of a call: exact, computed whole, or refused by name; anything else is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.errors import FarandoleError
from tests.layout.oracle.calls import Found, plain
from tests.layout.oracle.database import Given
from tests.layout.oracle.ways import Way

EXACT, WHOLE, REFUSED = "exact", "whole", "refused"
_TOLERANCE = 1e-9
_ROUNDING = 1e-13  # of samples that are some numbers around one
_TORCHS_OWN = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


class WrongError(AssertionError):
    """Neither what the plain call gives, nor a refusal."""


def expected(call: Callable[..., Any], given: Given) -> Found | Exception:
    """What the plain call gives, or how it refuses."""
    try:
        return plain(call, given)
    except Exception as error:
        return error


def verdict(
    call: Callable[..., Any],
    given: Given,
    way: Way,
    true: Found | Exception,
    names: set[str],
    undefined: bool = False,
) -> str:
    """`names`: those of the function, of which a refusal must say one. `undefined`: the values of
    the result are whatever the memory held."""
    try:
        found = way(call, given)
    except FarandoleError as error:
        if isinstance(true, Found) and not any(name in str(error) for name in names):
            raise WrongError(f"refused without one of the names {names}: {error}") from error
        return REFUSED
    except Exception as error:
        if isinstance(true, Exception) and isinstance(error, (type(true), *_TORCHS_OWN)):
            return REFUSED
        raise WrongError(f"{type(error).__name__}: {error}") from error
    if isinstance(true, Exception):
        raise WrongError(f"computed what torch refuses: {true}") from true
    _compare(found, true, undefined)
    return WHOLE if found.whole else EXACT


def _compare(found: Found, true: Found, undefined: bool) -> None:
    if len(found.results) != len(true.results):
        raise WrongError(f"{len(found.results)} results instead of {len(true.results)}")
    for at, (mine, its) in enumerate(zip(found.results, true.results, strict=True)):
        _require_same(f"result {at}", mine, its, undefined)
        if isinstance(its, Tensor) and mine.requires_grad != its.requires_grad:
            raise WrongError(f"result {at}: requires_grad is {mine.requires_grad}")
    for at, (mine, its) in enumerate(zip(found.after, true.after, strict=True)):
        _require_same(f"argument {at} after the call", mine, its, undefined)
    for at, (mine, its) in enumerate(zip(found.gradients, true.gradients, strict=True)):
        if its is None and at == 0 and mine is not None and not mine.any():
            continue  # what was put together of pieces has a gradient, of zeros
        if (mine is None) != (its is None):
            raise WrongError(f"gradient {at} is {'missing' if mine is None else 'one too many'}")
        if mine is not None:
            _require_same(f"gradient {at}", mine, its, undefined)


def _require_same(what: str, found: Any, true: Any, undefined: bool) -> None:
    if not isinstance(true, Tensor):
        if type(found) is not type(true) or (found != true and found == found):
            raise WrongError(f"{what}: {found!r} instead of {true!r}")
        return
    if not isinstance(found, Tensor):
        raise WrongError(f"{what}: {type(found).__name__} instead of a tensor")
    if (found.shape, found.dtype) != (true.shape, true.dtype):
        raise WrongError(
            f"{what}: {found.dtype}{list(found.shape)} instead of {true.dtype}{list(true.shape)}"
        )
    if undefined or not true.numel() or true.layout != torch.strided:
        return
    found, true = found.detach(), true.detach()
    # Most are equal to the bit, and to find that out is cheap; torch cannot for complex32.
    if true.dtype is not torch.complex32 and torch.equal(found, true):
        return
    if not true.is_floating_point() and not true.is_complex():
        raise WrongError(f"{what}: other whole numbers than the plain call's")
    # Sums in single precision, which some samples are in, depend on their order.
    tolerance = _TOLERANCE if true.dtype in (torch.float64, torch.complex128) else 1e-5
    if true.is_floating_point():
        found, true = found.double(), true.double()
    finite = true[true.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    try:
        torch.testing.assert_close(
            found, true, rtol=tolerance, atol=tolerance * largest + _ROUNDING, equal_nan=True
        )
    except AssertionError as error:
        raise WrongError(f"{what}: {' '.join(str(error).split())}") from error

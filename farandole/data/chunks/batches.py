"""Which samples a batch was made of, where it cannot be put together.

PyTorch says that two tensors differ in size, and not whose they are. The samples of a batch carry
their names as far as the function that collates them, in the same process, and no further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from farandole.errors import DataError, FarandoleError


class NamedSamples(list[Any]):
    """`name(at)` says which file the sample at that place is from."""

    def __init__(self, samples: Iterable[Any], name: Callable[[int], str]) -> None:
        super().__init__(samples)
        self.name = name


class NamingCollate:
    """Takes the place of a `collate_fn`, and calls it with a plain list."""

    def __init__(self, own: Callable[[list[Any]], Any]) -> None:
        self.own = own

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.own(list(samples))
        except FarandoleError:
            raise
        except Exception as error:
            if not isinstance(samples, NamedSamples):
                raise
            said = f"{type(error).__name__}: {error}"
            raise DataError(
                f"a batch of {len(samples)} samples cannot be put together: {said}. "
                f"{_difference(samples)} Make them alike in the transform, or pass a collate_fn."
            ) from error


def _difference(samples: NamedSamples) -> str:
    """Names a sample that is unlike most, and one of those."""
    kinds = [tuple(_kinds(sample)) for sample in samples]
    usual = Counter(kinds).most_common(1)[0][0]
    odd = next((at for at, kind in enumerate(kinds) if kind != usual), None)
    if odd is None:
        return f"It begins with {samples.name(0)}."
    like = kinds.index(usual)
    return (
        f"Unlike the others, {samples.name(odd)} is {', '.join(kinds[odd])}; {samples.name(like)} "
        f"is {', '.join(usual)}."
    )


def _kinds(sample: Any, place: str = "") -> Iterable[str]:
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from _kinds(value, f"{place}[{key!r}]")
    elif isinstance(sample, (list, tuple)):
        for at, value in enumerate(sample):
            yield from _kinds(value, f"{place}[{at}]")
    elif hasattr(sample, "shape") and hasattr(sample, "dtype"):
        yield f"{place} {sample.dtype} of shape {tuple(sample.shape)}".strip()
    else:
        yield f"{place} {type(sample).__name__}".strip()

"""The loaders of a run: which call of `run.loader` gets which, and where each of them stands.

The same call in the next epoch gets the same loader, which goes on to its next epoch. A call with
other options gets another loader; then either both are in use, such as one for training and one to
evaluate with, or the options change from epoch to epoch (a batch that grows, a `collate_fn` made
anew). In the second case the new loader follows the old one: it takes its place and goes on with
its epochs, or each would begin with epoch 0 and its one order. There are as many places after ten
epochs as after one, so a checkpoint, which lists them, fits a run that is resumed in any epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from farandole.data.loader import Loader
from farandole.data.position import Position
from farandole.data.sameness import same, same_mapping


@dataclass(frozen=True)
class Request:
    """One call of `run.loader`. The source is kept: another may not get its address meanwhile."""

    source: Any  # a dataset or a DataLoader
    options: Mapping[str, Any]  # those that were given
    training: bool  # or evaluation: gradients were off
    run_epoch: int | None  # None: outside of `run.epochs`

    @property
    def dataset(self) -> Any:
        return self.source.dataset if isinstance(self.source, DataLoader) else self.source


@dataclass
class _Place:
    request: Request  # the last one that was served here
    loader: Loader

    def follows_from(self, request: Request) -> bool:
        """Whether the request is for the epochs after this loader's, not for a second loader."""
        position = self.loader.position
        if (
            self.request.dataset is not request.dataset
            or self.request.training != request.training
            or position.reader is not None
        ):
            return False
        if request.run_epoch is None:
            return position.read_whole
        return (self.request.run_epoch or 0) < request.run_epoch

    def difference(self, request: Request) -> tuple[int, int]:
        """How many options are given in one of the two calls only, and how many differ."""
        ours, theirs = self.request.options, request.options
        both = ours.keys() & theirs.keys()
        return len(ours.keys() ^ theirs.keys()), sum(not same(ours[k], theirs[k]) for k in both)


class Loaders:
    """All loaders of one run, in the order in which their places were first asked for."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Loader]:
        return (place.loader for place in self._places)

    def find(self, request: Request) -> Loader | None:
        """The loader that was made for such a call before."""
        for place in self._places:
            known = place.request
            if known.source is request.source and same_mapping(known.options, request.options):
                place.request = replace(known, run_epoch=request.run_epoch)
                return place.loader
        return None

    def position(self, request: Request) -> Position | None:
        """Where a new loader goes on, if it follows another: they then share their position."""
        place = self._predecessor(request)
        return None if place is None else place.loader.position

    def first_epoch(self, request: Request) -> int:
        """Of a loader that follows none: not one whose order was trained on already."""
        if not request.training:
            return 0
        reached = (
            place.loader.epoch
            for place in self._places
            if place.request.training and place.request.dataset is request.dataset
        )
        return max(reached, default=request.run_epoch or 0)

    def add(self, request: Request, loader: Loader) -> None:
        """Keeps a new loader, in the place of the one that it follows, if there is one."""
        for place in self._places:
            if place.loader.position is loader.position:
                place.request, place.loader = request, loader
                return
        self._places.append(_Place(request, loader))

    def _predecessor(self, request: Request) -> _Place | None:
        before = [place for place in self._places if place.follows_from(request)]
        return min(before, key=lambda place: place.difference(request), default=None)

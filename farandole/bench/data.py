"""What `farandole bench data` says of its figures: which side limits, where the time goes, and what
to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_OVERLAPS: Final = 0.9  # of the slower side: less, and they wait for each other
_LARGE: Final = 0.3  # a part of the time worth a change


@dataclass(frozen=True)
class InputFigures:
    """Samples per second of all ranks together; seconds for one sample of one rank by stage."""

    both: float
    model: float
    input: float
    ranks: int
    global_batch: int
    num_workers: int
    pin_memory: bool
    cores: int
    device: str
    chunked: bool
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def input_limits(self) -> bool:
        return self.input < self.model

    @property
    def slower(self) -> float:
        return min(self.input, self.model)

    def part(self, *stages: str) -> float:
        """Of the time of loading a sample."""
        total = sum(self.stages.values())
        return sum(self.stages.get(name, 0.0) for name in stages) / total if total else 0.0


def lines(figures: InputFigures) -> Iterator[str]:
    """What is printed."""
    yield f"Workers: {figures.ranks}, {figures.global_batch} samples in a step, {figures.device}"
    for name, rate in (
        ("input alone", figures.input),
        ("model alone", figures.model),
        ("both", figures.both),
    ):
        yield f"{name:12} {rate:12,.1f} samples/s"
    if figures.stages:
        yield "Loading one sample, in one process:"
        for name, seconds in figures.stages.items():
            yield f"  {name:16} {seconds * 1e6:10,.1f} µs  {figures.part(name):4.0%}"
    slower, faster = ("input", "model") if figures.input_limits else ("model", "input")
    ratio = max(figures.input, figures.model) / max(figures.slower, 1e-9)
    yield f"The {slower} limits: the {faster} alone is {ratio:.1f} times as fast."
    advice = list(changes(figures))
    yield from (f"- {line}" for line in advice)
    if not advice:
        yield "- There is nothing to change about the input."


def changes(figures: InputFigures) -> Iterator[str]:
    """What to change, if anything; the most promising first."""
    free = max(1, figures.cores // max(1, figures.ranks) - 1)
    overlaps = figures.both >= _OVERLAPS * figures.slower
    if not figures.input_limits:
        if not overlaps and figures.num_workers == 0:
            yield "num_workers=1: load the next batch while the model works. Now they take turns."
        elif not overlaps:
            yield (
                f"Both together reach {figures.both / figures.slower:.0%} of the model alone: "
                "loading processes and the model share the cores. Try fewer num_workers."
            )
        return
    if figures.part("open") >= _LARGE:
        yield (
            "Opening files takes "
            f"{figures.part('open'):.0%}: `farandole pack FOLDER SHARDS` makes few large files of "
            "many, for fd.data.shards."
        )
    if figures.part("read") >= _LARGE:
        yield (
            f"Reading takes {figures.part('read'):.0%}: keep the files on a local disk, and pack "
            "small ones into shards."
        )
    if figures.num_workers < free:
        yield (
            f"num_workers={free} instead of {figures.num_workers}: there are {figures.cores} cores "
            f"for {figures.ranks} rank(s)."
        )
    elif figures.part("decode", "read and decode", "transform") >= _LARGE:
        yield (
            "All cores load already. Keep what decoding and the transform make (smaller images, "
            "arrays) in files, or give the job more cores."
        )
    if figures.part("copy") >= _LARGE and not figures.pin_memory:
        yield f"Copying takes {figures.part('copy'):.0%}: pin_memory=True."


def figures_of(record: Mapping[str, Any]) -> InputFigures:
    """Of what a worker wrote."""
    return InputFigures(**record)

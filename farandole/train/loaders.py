"""`run.loader`: finds the loader that a call asks for, or makes it and ties it to the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from farandole.data import BatchInfo, Loader, LoaderOptions, Loaders, Request
from farandole.data.bench.loader import BenchLoader
from farandole.train.passes import Passes
from farandole.train.session import Session
from farandole.train.spans import WatchedLoader


class RunLoaders:
    """The loaders of a run, in the order in which the script asked for them."""

    def __init__(self, session: Session, passes: Passes) -> None:
        self._session = session
        self._passes = passes
        self._known = Loaders()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Loader]:
        return iter(self._known)

    def get(
        self,
        source: Dataset[Any] | DataLoader[Any],
        options: LoaderOptions,
        torch_options: dict[str, Any],
    ) -> Loader:
        """The one that an earlier call with the same source and options got, or a new one."""
        progress = self._session.progress
        request = Request(
            source,
            {**_given(options), **torch_options},
            training=options.is_training,
            run_epoch=progress.epoch if progress.epoch_under_way else None,
        )
        return self._known.find(request) or self._new(request, options, torch_options)

    def _new(
        self, request: Request, options: LoaderOptions, torch_options: dict[str, Any]
    ) -> Loader:
        session, passes = self._session, self._passes

        # The loader is not there yet when these are made; it is when they are called.
        def on_batch(info: BatchInfo) -> None:
            passes.batch(loader, info)

        def on_begin(fresh: bool) -> None:
            passes.begin(loader, fresh=fresh)

        def on_end(finished: bool) -> None:
            passes.end(loader, finished=finished)

        def on_pause(within: bool) -> None:
            passes.pause(loader, within=within)

        def on_skip(reasons: Sequence[str]) -> None:
            passes.skipped.add(reasons, counts=loader.is_training)

        followed = self._known.position(request)
        loader = self._kind(
            request.source,
            options,
            group=session.replicas,
            device=session.device,
            position=followed,
            on_batch=on_batch,
            on_begin=on_begin,
            on_end=on_end,
            on_pause=on_pause,
            on_shares=passes.share,
            on_skip=on_skip,
            **torch_options,
        )
        if isinstance(loader, BenchLoader) and session.settings.bench_data is not None:
            loader.bench = session.settings.bench_data
        loader.process_start.outlives_stop_signals = passes.preemption is not None
        if followed is None:
            self._place(loader, request)
        self._known.add(request, loader)
        if loader.shares is not None and loader.shares.dropped:
            session.print(f"drop_last leaves out {loader.shares.dropped} samples in each epoch")
        return loader

    @property
    def _kind(self) -> type[Loader]:
        if self._session.settings.bench_data is not None:
            return BenchLoader
        return Loader if self._session.watch is None else WatchedLoader

    def _place(self, loader: Loader, request: Request) -> None:
        """Where a loader begins that follows no other one."""
        progress, number = self._session.progress, len(self._known)
        loader.epoch = self._known.first_epoch(request)
        if self._session.group.transport.joined_late:
            loader.epoch = progress.epoch
        if number < len(progress.loader_states):
            loader.load_state_dict(progress.loader_states[number])

    def outlive_stop_signals(self) -> None:
        """Their processes are needed until the last save: a signal to all must not end them."""
        for loader in self._known:
            loader.process_start.outlives_stop_signals = True


def _given(options: LoaderOptions) -> dict[str, Any]:
    """What a script has said that is not the default; the seed is the run's."""
    said = {
        "batch_size": options.batch_size,
        "global_batch_size": options.global_batch_size,
        "shuffle": options.shuffle,
        "drop_last": options.drop_last or None,
        "training": options.training,
        "shares": options.shares if options.shares != "equal" else None,
    }
    return {name: value for name, value in said.items() if value is not None}

"""Layout and sync meet: a trainer's step when the model is cut into stages.

    world of 6 ranks, layout of 3     pipe 0: ranks 0 1 2     replicas: {0, 3} {1, 4} {2, 5}
                                      pipe 1: ranks 3 4 5

The ranks of a pipe hold one replica of the model, a stage each. Ranks in the same place of all
pipes hold the same stages, and a strategy keeps them in step, as it would whole models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from farandole.comm import Group
from farandole.data import Shares
from farandole.data.tile_source import TileSource, TileView
from farandole.errors import InexactError, StageError, UserError
from farandole.layout import Layout
from farandole.layout.arguments import Arguments, arguments_of
from farandole.layout.assemble import Assembled, ComputeSettings, assemble
from farandole.layout.partition.blocks import Block
from farandole.layout.partition.choose import Choice, choose
from farandole.layout.partition.stage_module import shared_names
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.recording.cut_graph import recorded_states
from farandole.layout.recording.tracing import is_traced
from farandole.layout.self_check import SelfCheck
from farandole.layout.self_check.compare import RankPart
from farandole.layout.tile_groups import TileGroups, describe_grid
from farandole.layout.tiles.core.inputs import mark_tile, tile_box
from farandole.sync import AllReduce, Strategy, Synchronizer
from farandole.sync.common.alignment import check_same_model, spread_from_first
from farandole.topology import Topology
from farandole.train.checkpoint.saver import PartSaver
from farandole.train.engines.engine import Engine
from farandole.train.engines.first_steps import FirstSteps
from farandole.train.engines.pipelined_synchronizer import PipelinedSynchronizer
from farandole.train.engines.preparation import (
    agreed_blocks,
    can_outlive,
    check_combination,
    find_blocks,
)
from farandole.train.engines.recipe import Recipe
from farandole.train.session import Session

_FAR_APART = 1_000_003


class PipelinedEngine(Engine):
    """One replica over the ranks of a pipe; takes the model apart."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        recipe: Recipe,
        layout: Layout,
        sync: Strategy | None,
        sample: Any,
        *,
        check: bool,
    ) -> None:
        self._session = session
        self._objective = recipe.objective
        self._checked_cut: Shares | None = None
        self._views: dict[int, TileView] = {}  # by dataset: one loader each, however often asked
        strategy = session.settings.sync or sync or AllReduce()
        check_combination(session, layout, strategy, recipe)
        # 1. One model, the same on all ranks; a layout without open questions.
        check_same_model(model, session.group)
        spread_from_first(model, None, session.group)
        blocks, choice = self._cut(model, layout, recipe, sample)
        layout = choice.layout
        # 2. Who sits where.
        pipe, replicas = _groups(session, layout)
        # 3. The stages of this rank, and the strategy around them.
        aliases = shared_names(model)
        layers = {module: name for name, module in model.named_modules() if name}
        self._check = self._self_check(
            model, check=check, strategy=strategy, pipe=pipe, replicas=replicas, sample=sample
        )
        assembled = self._assembled(model, blocks, layout, recipe, pipe, replicas, strict=check)
        self._held = RankPart(
            assembled.pipelined,
            assembled.bridge,
            assembled.names,
            {layers[each]: each for each in assembled.bridge.modules() if each in layers},
            assembled.tilings,
        )
        self.optimizer = recipe.make_optimizer(assembled.bridge.parameters())
        synchronizer = self._connect(assembled, strategy, replicas)
        self.model = synchronizer.model
        # 4. What the session must know to count, to save and to end.
        session.strategy, session.layout, session.replicas = strategy, layout, replicas
        saver = self._add_to(session, synchronizer, assembled, aliases)
        self._survivors = session.survivors
        if self._survivors is not None and can_outlive(strategy, layout, recipe, replicas):
            self._survivors.protect(saver)
            self._pipelined.gradients_ready = self._survivors.meet
        self._first_steps = FirstSteps(session, self._pipelined, self._tilings, choice)

    def _assembled(
        self,
        model: nn.Module,
        blocks: list[Block],
        layout: Layout,
        recipe: Recipe,
        pipe: Group,
        replicas: Group,
        *,
        strict: bool,
    ) -> Assembled:
        """*Together.* Takes the model apart: the stages of this rank, ready to compute."""
        session = self._session
        assembled = assemble(
            model,
            blocks,
            layout,
            pipe,
            recipe.objective,
            # Replicas see different data, and so draw different random numbers too.
            ComputeSettings(
                session.seed + _FAR_APART * replicas.rank,
                session.device,
                recipe.precision,
                recipe.clip,
            ),
            first_rank=session.rank - pipe.rank,
            strict=strict,
        )
        for state in self._recorded:
            state.taken_apart()
        self._pipelined = assembled.pipelined
        self._tilings = assembled.tilings
        if max(layout.group_sizes) > 1:
            tile_groups, count = TileGroups(layout.group_sizes), session.size // layout.ranks
            session.print(describe_grid(tile_groups, self._pipelined.runner.places, layout, count))
        return assembled

    def _add_to(
        self,
        session: Session,
        synchronizer: Synchronizer,
        assembled: Assembled,
        aliases: Mapping[str, str],
    ) -> PartSaver:
        saver = PartSaver(
            synchronizer,
            self.optimizer,
            self._pipelined,
            assembled.names,
            aliases,
            assembled.owned,
            writes=session.rank == self._pipelined.pipe.rank,
        )
        session.models.add(synchronizer, saver)
        return saver

    def _cut(
        self, model: nn.Module, layout: Layout, recipe: Recipe, sample: Any
    ) -> tuple[list[Block], Choice]:
        """*Together.* The model's blocks, and the layout with nothing left open."""
        session = self._session
        given = None if sample is None else arguments_of(sample)
        blocks = agreed_blocks(
            session, lambda: find_blocks(model, layout, recipe, given, session.device)
        )
        # What was traced without a sample takes one argument; what else a model takes is not known.
        self._one_argument = given is None and is_traced(blocks[0].module)
        self._recorded = recorded_states(block.module for block in blocks)
        if sample is not None:
            session.print(
                f"measuring the model's {len(blocks)} blocks, to find out where to cut it …"
            )
        choice = choose(layout, blocks, session.group, given, session.device)
        session.print(f"layout {choice.layout}" + (f"\n{choice.text}" if choice.text else ""))
        return blocks, choice

    def _self_check(
        self,
        model: nn.Module,
        *,
        check: bool,
        strategy: Strategy,
        pipe: Group,
        replicas: Group,
        sample: Any,
    ) -> SelfCheck | None:
        """Looks at the model while it is whole; runs with the first batch."""
        if not check:
            return None
        # Statistics over all replicas are those of no batch that a plain model sees.
        if getattr(strategy, "batchnorm", None) == "sync" and replicas.size > 1:
            self._session.print(
                "the layout is not checked: BatchNorm's statistics are of all replicas"
            )
            return None
        return SelfCheck(
            model,
            self._objective,
            self._session.device,
            keeps=pipe.rank == 0,
            double=sample is None,
        )

    def _connect(
        self, assembled: Assembled, strategy: Strategy, replicas: Group
    ) -> PipelinedSynchronizer:
        """*Together.* A strategy keeps this rank's stages in step with those of other replicas."""
        pipelined, session = self._pipelined, self._session
        layout, pipe = pipelined.layout, pipelined.pipe
        inner = strategy.build(assembled.bridge, self.optimizer, replicas)
        pipelined.connect(_exchange(assembled.bridge, inner), self.optimizer)
        if inner.guard is not None:
            inner.guard.ranks = range(pipe.rank, session.size, layout.ranks)
            inner.guard.name_of = lambda name: assembled.names.get(name, name)
            # A stream updates stage by stage, and there is no step that all stages take together.
            inner.guard.peers = None if layout.streams else pipe
        return PipelinedSynchronizer(inner, pipelined)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        if self._session.cut is not None:
            self._check_cut(self._session.cut)
        self._first_steps.report()
        inputs = _plain(inputs)
        self._check_arguments(self._objective.arguments(inputs, targets))
        self._check_recording(modes=True)
        self._check_layout(inputs, targets)
        with nullcontext() if self._survivors is None else self._survivors.step():
            loss = self._pipelined.step(inputs, targets)
        self._first_steps.count()
        self._first_steps.report()
        if not self._pipelined.layout.streams or not loss.isnan():
            self._session.models.observe_loss(loss)
        return loss

    def _check_cut(self, cut: Shares) -> None:
        """A stream cannot take a batch that is too small. Said before the first, not after all the
        others of an epoch; all ranks know."""
        layout = self._pipelined.layout
        if layout.streams and cut != self._checked_cut and cut.fewest < layout.microbatches:
            raise UserError(
                f"{layout.schedule} wants {layout.microbatches} micro-batches in every step, and "
                f"the last step of an epoch has {len(cut.global_range(cut.steps - 1))} samples for "
                f"{cut.size} replicas. Use drop_last=True, or another batch size."
            )
        self._checked_cut = cut

    def _check_layout(self, inputs: Any, targets: Any) -> None:
        """Once, before the first step. What stops one replica stops all."""
        if self._check is None:
            return
        check, self._check = self._check, None
        said, refused, failed = "", "", ""
        started = time.perf_counter()
        try:
            said = check.run(self._held, inputs, targets)
        except InexactError as error:
            refused = str(error)
        except StageError as error:  # of another rank too, which may have refused
            failed = str(error)
        told = self._session.group.gather_json([refused, failed])
        for refused, _ in told:
            if refused:
                raise InexactError(refused)
        for _, failed in told:
            if failed:
                raise StageError(failed)
        self._session.print(f"{said} ({time.perf_counter() - started:.1f} s)")

    def predict(self, inputs: Any) -> Any:
        inputs = _plain(inputs)
        self._check_arguments(arguments_of(inputs))
        self._check_recording(modes=False)
        return self._pipelined.predict(inputs)

    def _check_recording(self, *, modes: bool) -> None:
        """What the model's code reads must be what it was when the model was cut."""
        for state in self._recorded:
            self._pipelined.refusing(partial(state.check, modes=modes))

    def _check_arguments(self, given: Arguments) -> None:
        if self._one_argument and (len(given.positional) != 1 or given.named):
            names = [*map(str, range(len(given.positional))), *given.named]
            raise UserError(
                f"the model was cut without a sample, so that it takes one argument, and is given "
                f"{', '.join(names)}. Pass run.trainer(…, sample=…), all arguments of a batch."
            )

    def reading(self, source: Any) -> tuple[Any, Callable[[Any], Any] | None]:
        tiling = next(iter(self._tilings.values()), None)
        whole = tiling is None or tiling.flow.shards.all_here or not self._pipelined.layout.tiles
        if tiling is None or whole or not isinstance(source, TileSource):
            return source, None
        image = tuple(source.image_size)
        if len(image) != tiling.flow.grid.spatial:
            raise UserError(
                f"image_size={image} of the dataset has {len(image)} axes, and layout "
                f"tiles={self._pipelined.layout.tiles} has {tiling.flow.grid.spatial}."
            )
        view = self._views.setdefault(id(source), TileView(source, tile_box(tiling.flow, image)))
        return view, lambda batch: mark_tile(tiling.flow, batch, image)


def _groups(session: Session, layout: Layout) -> tuple[Group, Group]:
    """*Together.* The ranks of this rank's pipe, and those in its place in all pipes."""
    place = session.rank % layout.ranks
    first = session.rank - place
    groups = []
    for ranks in (range(first, first + layout.ranks), range(place, session.size, layout.ranks)):
        group = session.group.subgroup(ranks)
        if session.settings.pretend_hosts is not None:  # as declared, and not as they really sit
            names = [session.topology.host(rank).name for rank in ranks]
            group.transport.topology = Topology.from_names(names)
        groups.append(group)
    pipe, replicas = groups
    return pipe, replicas


def _exchange(bridge: GradientBridge, synchronizer: Synchronizer) -> Callable[[], None] | None:
    """The backward pass that a strategy sees. Those of the stages are none of its business."""
    if not synchronizer.follows_gradients:
        return None
    synchronizer.listen(False)

    def exchange() -> None:
        synchronizer.listen(True)
        try:
            bridge.exchange()
        finally:
            synchronizer.listen(False)

    return exchange


def _plain(inputs: Any) -> Any:
    """A batch may be any mapping, such as a tokenizer's; torch's trees know dictionaries."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs

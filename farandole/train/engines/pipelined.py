"""Layout and sync meet: a trainer's step when the model is cut into stages.

    world of 6 ranks, layout of 3     pipe 0: ranks 0 1 2     replicas: {0, 3} {1, 4} {2, 5}
                                      pipe 1: ranks 3 4 5

The ranks of a pipe hold one replica of the model, a stage each. Ranks in the same place of all
pipes hold the same stages, and a strategy keeps them in step, as it would whole models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farandole.data import Shares
from farandole.data.tile_source import TileSource, TileView
from farandole.errors import InexactError, StageError, UserError
from farandole.layout import Layout
from farandole.layout.arguments import Arguments, arguments_of
from farandole.layout.assemble import ComputeSettings, assemble
from farandole.layout.partition.blocks import Block, Sample, blocks_of
from farandole.layout.partition.choose import choose
from farandole.layout.partition.part import shared_names
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.pipeline.memory import ActivationMeter, describe_memory
from farandole.layout.pipeline.micro import cut_batch
from farandole.layout.pipeline.pipelined import Pipelined
from farandole.layout.recording.cut_graph import recorded_states
from farandole.layout.recording.tracing import is_traced
from farandole.layout.self_check import SelfCheck
from farandole.layout.self_check.compare import Held
from farandole.layout.teams import Teams, describe_teams
from farandole.layout.tiles.halo.planning import plan_halos
from farandole.sync import AllReduce, Strategy, Synchronizer
from farandole.sync.common.alignment import check_same_model, spread_from_first
from farandole.topology import Topology
from farandole.train.checkpoint.saver import PartSaver
from farandole.train.engines.engine import Engine
from farandole.train.engines.recipe import Recipe
from farandole.train.settings import check_goes_with, check_workers, check_writable

if TYPE_CHECKING:
    from farandole.train.run import Run

_FAR_APART = 1_000_003


class PipelinedEngine(Engine):
    """One replica over the ranks of a pipe; takes the model apart."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        recipe: Recipe,
        layout: Layout,
        sync: Strategy | None,
        sample: Any,
        *,
        check: bool,
    ) -> None:
        self._run = run
        self._objective = recipe.objective
        strategy = run.settings.sync or sync or AllReduce()
        _check(run, layout, strategy, recipe)
        # 1. One model, the same on all ranks; a layout without open questions.
        check_same_model(model, run.group)
        spread_from_first(model, None, run.group)
        given = None if sample is None else arguments_of(sample)
        blocks = _agreed(run, lambda: _blocks(model, layout, recipe, given, run.device))
        # What was traced without a sample takes one argument; what else a model takes is not known.
        self._one_argument = given is None and is_traced(blocks[0].module)
        self._recorded = recorded_states(block.module for block in blocks)
        if sample is not None:
            run.print(f"measuring the model's {len(blocks)} blocks, to find out where to cut it …")
        choice = choose(layout, blocks, run.group, given, run.device)
        layout = choice.layout
        run.print(f"layout {layout}" + (f"\n{choice.text}" if choice.text else ""))
        # 2. Who sits where.
        place = run.rank % layout.ranks
        first = run.rank - place
        pipe = run.group.subgroup(range(first, first + layout.ranks))
        replicas = run.group.subgroup(range(place, run.size, layout.ranks))
        if run.settings.hosts is not None:  # as declared, and not as they really sit
            for group, ranks in (
                (pipe, range(first, first + layout.ranks)),
                (replicas, range(place, run.size, layout.ranks)),
            ):
                names = [run.topology.host(rank).name for rank in ranks]
                group.transport.topology = Topology.from_names(names)
        # 3. The stages of this rank, and the strategy around them.
        aliases = shared_names(model)
        layers = {module: name for name, module in model.named_modules() if name}
        self._checked_cut: Shares | None = None
        self._check: SelfCheck | None = None
        # Statistics over all replicas are those of no batch that a plain model sees.
        spans_replicas = getattr(strategy, "batchnorm", None) == "sync" and replicas.size > 1
        if check and spans_replicas:
            run.print("the layout is not checked: BatchNorm's statistics are of all replicas")
        elif check:
            self._check = SelfCheck(
                model, recipe.objective, run.device, keeps=pipe.rank == 0, double=sample is None
            )
        assembled = assemble(
            model,
            blocks,
            layout,
            pipe,
            recipe.objective,
            # Replicas see different data, and so draw different random numbers too.
            ComputeSettings(
                run.seed + _FAR_APART * replicas.rank, run.device, recipe.precision, recipe.clip
            ),
            first,
            strict=check,
        )
        for state in self._recorded:
            state.taken_apart()
        self._pipelined = assembled.pipelined
        self._tilings = assembled.tilings
        self._held = Held(
            assembled.pipelined,
            assembled.gate,
            assembled.names,
            {layers[each]: each for each in assembled.gate.modules() if each in layers},
            assembled.tilings,
        )
        self._views: dict[
            int, TileView
        ] = {}  # by dataset: one loader for each, however often asked
        if max(layout.teams) > 1:
            count = run.size // layout.ranks
            run.print(describe_teams(Teams(layout.teams), self._pipelined.places, layout, count))
        self.optimizer = recipe.make_optimizer(assembled.gate.parameters())
        inner = strategy.build(assembled.gate, self.optimizer, replicas)
        self._pipelined.connect(_exchange(assembled.gate, inner), self.optimizer)
        synchronizer = PipedSynchronizer(inner, self._pipelined)
        if inner.guard is not None:
            inner.guard.ranks = range(place, run.size, layout.ranks)
            inner.guard.name_of = lambda name: assembled.names.get(name, name)
            # A stream updates stage by stage, and there is no step that all stages take together.
            inner.guard.peers = None if layout.streams else pipe
        self.model = synchronizer.model
        # 4. What the run must know to count, to save and to end.
        run._strategy, run._layout, run._replicas = strategy, layout, replicas
        owned = assembled.owned if first == 0 else set()
        saver = PartSaver(
            synchronizer, self.optimizer, self._pipelined, assembled.names, aliases, owned
        )
        run._keep(synchronizer, saver)
        self._predicted = choice.activation_bytes and [
            peak
            for peak, members in zip(choice.activation_bytes, layout.teams, strict=True)
            for _ in range(members)
        ]
        self._meter: ActivationMeter | None = self._pipelined.measure()
        # The first step may be unlike all others; a stream must have filled first.
        self._steps_to_measure = 2 * layout.ranks + 2 if layout.streams else 2

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        if self._run._cut is not None:
            self._check_cut(self._run._cut)
        self._tell_memory()
        inputs = _plain(inputs)
        self._check_arguments(self._objective.arguments(inputs, targets))
        self._check_recording(modes=True)
        self._check_layout(inputs, targets)
        loss = self._pipelined.step(inputs, targets)
        self._steps_to_measure -= 1
        self._tell_memory()
        if not self._pipelined.layout.streams or not loss.isnan():
            self._run.observe_loss(loss)
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
        told = self._run.group.gather_json([refused, failed])
        for refused, _ in told:
            if refused:
                raise InexactError(refused)
        for _, failed in told:
            if failed:
                raise StageError(failed)
        self._run.print(f"{said} ({time.perf_counter() - started:.1f} s)")

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
        whole = tiling is None or tiling.flow.lanes.all_here or not self._pipelined.layout.tiles
        if tiling is None or whole or not isinstance(source, TileSource):
            return source, None
        image = tuple(source.image_size)
        if len(image) != tiling.flow.grid.spatial:
            raise UserError(
                f"image_size={image} of the dataset has {len(image)} axes, and layout "
                f"tiles={self._pipelined.layout.tiles} has {tiling.flow.grid.spatial}."
            )
        view = self._views.setdefault(id(source), TileView(source, tiling.box(image)))
        return view, lambda batch: tiling.mark(batch, image)

    def _tell_memory(self) -> None:
        """Prints, once, what the activations of every rank took, and were said to take.

        The ranks meet for it. In a stream one may wait for what another does in its next step, so
        they meet when nothing is under way.
        """
        if self._meter is None or self._steps_to_measure > 0:
            return
        self._pipelined.stop_measuring()
        if self._pipelined.turns:
            return
        meter, self._meter = self._meter, None
        pipe, device = self._pipelined.pipe, self._run.device
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        told = pipe.gather_json([meter.peak_bytes, sorted(self._pipelined.stages), on_device])
        measured, stages, peaks = zip(*told, strict=True)
        self._run.print(describe_memory(measured, self._predicted, stages, peaks))
        if self._pipelined.layout.lanes > 1:
            self._plan_halos()

    def _plan_halos(self) -> None:
        """The layers and how long they take are known by now."""
        pipelined = self._pipelined
        lines = plan_halos(self._tilings, pipelined.layout.halo, pipelined.team)
        told = [line for lines in pipelined.pipe.gather_json(lines) for line in lines]
        first = {line.split(":")[0]: line for line in reversed(told)}  # the lanes say the same
        self._run.print("\n".join(first[stage] for stage in sorted(first)))


def _exchange(gate: GradientBridge, synchronizer: Synchronizer) -> Callable[[], None] | None:
    """The backward pass that a strategy sees. Those of the stages are none of its business."""
    if not synchronizer.follows_gradients:
        return None
    synchronizer.listen(False)

    def exchange() -> None:
        synchronizer.listen(True)
        try:
            gate.exchange()
        finally:
            synchronizer.listen(False)

    return exchange


def _agreed(run: Run, find: Callable[[], list[Block]]) -> list[Block]:
    """*Together.* The blocks, if they are the same on all ranks; what stops one stops all."""
    blocks: list[Block] = []
    reason = ""
    try:
        blocks = find()
    except UserError as error:
        reason = str(error)
    told = run.group.gather_json([reason, [block.name for block in blocks]])
    for rank, (reason, names) in enumerate(told):
        if reason:
            raise UserError(reason)
        if names != told[0][1]:
            raise UserError(
                f"rank {rank} cuts the model into {len(names)} blocks, {', '.join(names)}, and "
                f"rank 0 into {len(told[0][1])}, {', '.join(told[0][1])}. Give all ranks the same "
                "model and the same sample."
            )
    return blocks


def _plain(inputs: Any) -> Any:
    """A batch may be any mapping, such as a tokenizer's; torch's trees know dictionaries."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _blocks(
    model: nn.Module,
    layout: Layout,
    recipe: Recipe,
    given: Arguments | None,
    device: torch.device,
) -> list[Block]:
    """Of a model that stays in one stage, one block if there is no way to find more."""
    sample = None
    if given is not None:
        micro = cut_batch(given, (), layout.microbatches, "mean")[0]
        sample = Sample(micro.inputs, device, recipe.precision)
    try:
        return blocks_of(model, layout.cuts, sample)
    except UserError:
        if layout.stages != 1 or layout.cuts:
            raise
        return [Block("the model", model)]


def _check(run: Run, layout: Layout, strategy: Strategy, recipe: Recipe) -> None:
    if run._savers:
        raise UserError("a run with a layout has one model, and this one has another already.")
    if run.rank == 0:
        check_writable(run.folder)
    check_workers(layout, run.size)
    check_goes_with(layout, strategy)
    if recipe.precision is torch.float16 and layout.streams:
        raise UserError(
            f"precision=torch.float16 skips an update on all stages when one overflows, and "
            f"{layout.schedule} updates stage by stage. Take torch.bfloat16, or schedule=1f1b."
        )
    if recipe.loss is None and layout.lanes > 1:
        raise UserError(
            f"loss=None: the model computes its own loss, and layout {layout} cuts its images: of "
            "a tile it would be another. Let the model return its output, and pass a loss function."
        )
    if recipe.clip is not None and layout.streams:
        raise UserError(
            f"clip={recipe.clip:g} needs the gradients of all stages at once, and "
            f"{layout.schedule} updates stage by stage. Leave it out, or take schedule=1f1b."
        )


class PipedSynchronizer(Synchronizer):
    """A strategy's synchronizer of stages: what is under way in the pipeline ends first."""

    def __init__(self, inner: Synchronizer, pipelined: Pipelined) -> None:
        super().__init__(inner.model, guard=inner.guard)
        self.in_step_after_pass = inner.in_step_after_pass
        self._inner = inner
        self._pipelined = pipelined
        self.notes = inner.notes
        self._begun: dict[int, tuple[float, float | None, float]] = {}  # by turn of a stream
        pipelined.before_update = self._begin_late

    def check_finite(self, on: bool) -> None:
        self._inner.check_finite(on)

    def share_samples(self, readers: int) -> None:
        self._inner.share_samples(readers)

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        if self._pipelined.layout.streams:
            self._begun[self._pipelined.turns] = weight, progress, samples
        else:
            self._inner.begin_step(weight, progress, samples)

    def _begin_late(self, turns: Sequence[int]) -> None:
        """In a stream, the batch that an update is of began several steps ago."""
        begun = [self._begun.pop(turn) for turn in turns if turn in self._begun]
        if begun:
            weight = sum(weight for weight, _, _ in begun) / len(begun)
            samples = sum(samples for _, _, samples in begun)
            self._inner.begin_step(weight, begun[-1][1], samples)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._inner.no_sync()

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        self._inner.observe_loss(loss)

    def hear(self, loss: float) -> None:
        self._inner.hear(loss)

    def begin_pass(self) -> None:
        self._inner.begin_pass()

    def end_pass(self) -> None:
        self._pipelined.drain()
        self._begun.clear()  # of batches that other ranks of the stage have computed
        self._inner.end_pass()

    def whole_model(self) -> dict[str, Any]:
        return self._inner.whole_model()

    def close(self) -> None:
        self._inner.close()
        self._pipelined.close()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "pipeline": self._pipelined.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state["inner"])
        self._pipelined.load_state_dict(state["pipeline"])

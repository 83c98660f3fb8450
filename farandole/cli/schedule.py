"""`farandole schedule`: shows the pipeline of a layout before it runs.

The timeline shows which rank does what when, how long it waits and what it holds. The command
trains nothing and needs no model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farandole.bench.ends import check_output
from farandole.cli.options import schedules
from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.layout.layout import Layout
    from farandole.schedule.pipelines import Pipeline, PipelineTimeline

_STEPS = 6
_NARROWEST, _WIDEST = 40, 240


class _WithSchedules(click.Command):
    """Lists the schedules below its help. They are looked up only when help is shown."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.epilog = f"Schedules: {', '.join(schedules())}."
        super().format_epilog(ctx, formatter)


@click.command(cls=_WithSchedules)
@click.argument("layout")
@click.option(
    "--forward",
    default="1",
    show_default=True,
    metavar="SECONDS",
    help="Duration of the forward pass of a micro-batch, in seconds: one number for all stages, or "
    "one for each, as in 1+2+1.",
)
@click.option(
    "--backward",
    default="2",
    show_default=True,
    metavar="SECONDS",
    help="Duration of the backward pass of a micro-batch, in the same form.",
)
@click.option(
    "--transfer",
    type=float,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Duration of a transfer from one stage to the next, in seconds.",
)
@click.option(
    "--steps", type=int, help=f"Number of steps to show, for pipedream and 2bw. [{_STEPS}]"
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw the timeline to FILE, a .png or .svg.",
)
def schedule(
    layout: str,
    forward: str,
    backward: str,
    transfer: float,
    steps: int | None,
    plot: Path | None,
) -> None:
    """Check the pipeline of LAYOUT, and show it as a timeline.

    A table below the timeline says what each rank holds and how long it waits.

    \b
      farandole schedule stages=4,microbatches=8,schedule=1f1b
      farandole schedule stages=4,schedule=pipedream --steps 10 --plot pipedream.svg
    """
    from farandole.layout.layout import parse_layout
    from farandole.schedule.pipelines import Costs, check, simulate

    wanted = parse_layout(layout)
    target = _plot_target(plot)
    pipeline = _pipeline(wanted, steps)
    costs = Costs(
        _by_stage("--forward", forward, pipeline.stages),
        _by_stage("--backward", backward, pipeline.stages),
        transfer_seconds=transfer,
    )
    check(pipeline, same_version=wanted.stash)
    timeline = simulate(pipeline, costs)
    click.echo(
        f"{pipeline.name}: {pipeline.stages} stage(s) on {pipeline.ranks} rank(s), "
        f"{pipeline.micros} micro-batch(es)\n"
    )
    columns = shutil.get_terminal_size((160, 24)).columns
    click.echo(timeline.draw(min(_WIDEST, max(_NARROWEST, columns))))
    click.echo("\n" + "\n".join(_facts(timeline)))
    if max(wanted.group_sizes) > 1:
        from farandole.layout.tile_groups import TileGroups, describe_grid

        click.echo("\nEach of these ranks stands for one worker on every tile:")
        click.echo(describe_grid(TileGroups(wanted.group_sizes), pipeline, wanted, 1))
    if target is not None:
        from farandole.report.plots.timeline import draw_timeline

        draw_timeline(timeline, target)
        click.echo(f"drawn: {plot}")


def _pipeline(layout: Layout, steps: int | None) -> Pipeline:
    if layout.stages == "auto":
        raise UserError(
            "stages=auto is found by measuring a model, and there is none here. Give a number of "
            "stages, such as stages=4."
        )
    if layout.streams:
        return layout.stream().unroll(_STEPS if steps is None else steps)
    if steps is not None:
        raise UserError(
            f"--steps {steps}: each step of {layout.schedule} ends before the next begins, so one "
            "is shown. Leave it out, or take pipedream or 2bw."
        )
    return layout.pipeline()


def _by_stage(option: str, text: str, stages: int) -> tuple[float, ...]:
    try:
        seconds = tuple(float(part) for part in text.split("+"))
    except ValueError:
        raise UserError(
            f"{option} {text}: give seconds, or as many as stages, such as 1+2+1."
        ) from None
    if len(seconds) == 1:
        return seconds * stages
    if len(seconds) != stages:
        raise UserError(
            f"{option} {text}: {len(seconds)} numbers for {stages} stages. Give {stages}, or one "
            "for all."
        )
    return seconds


def _plot_target(plot: Path | None) -> Path | None:
    """Found out now rather than after the timeline."""
    if plot is None:
        return None
    from farandole.report.plots.timeline import check_ending

    check_ending(plot)
    return check_output("--plot", plot)


def _facts(timeline: PipelineTimeline) -> list[str]:
    """A table of the ranks, and what it comes to."""
    from farandole.report import units
    from farandole.schedule.pipelines import facts

    pipeline, seconds = timeline.pipeline, timeline.seconds
    known = facts(pipeline)
    lines = [f"{'rank':>4}  {'stages':>8}  {'activations':>11}  {'versions':>8}  {'idle':>7}"]
    for rank, busy in enumerate(timeline.busy_seconds):
        idle = units.share(1 - busy / seconds if seconds else 0.0)
        stages = "+".join(map(str, pipeline.held(rank)))
        lines.append(
            f"{rank:>4}  {stages:>8}  {known.activations[rank]:>11}  {known.versions[rank]:>8}  "
            f"{idle:>7}"
        )
    lines += [
        "activations: of a micro-batch on a stage, held at once; versions: of the weights",
        f"{seconds:.4g} s; {max(timeline.busy_seconds):.4g} s if nobody waited; "
        f"idle: {units.share(timeline.idle_share)} of all ranks' time",
    ]
    return lines

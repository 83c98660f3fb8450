"""Help with headings."""

from __future__ import annotations

import click
from click.testing import CliRunner

from farandole.cli.run import SECTIONS, run
from farandole.cli.sections import SectionedCommand


def test_options_come_under_their_headings_in_the_order_of_the_headings() -> None:
    @click.command(cls=SectionedCommand, sections={"Second": ["--b"], "First": ["--a", "-c"]})
    @click.option("--a", help="is a")
    @click.option("--b", help="is b")
    @click.option("-c", "--see", help="is c")
    @click.option("--secret", hidden=True)
    def command(**_: str) -> None:
        """Do it."""

    shown = CliRunner().invoke(command, ["--help"]).output
    words = ["Second:", "--b", "First:", "--a", "--see", "Other:", "--help"]
    places = [shown.index(word) for word in words]
    assert places == sorted(places)
    assert "--secret" not in shown


def test_every_option_of_run_has_one_heading_and_every_heading_names_options() -> None:
    named = [name for names in SECTIONS.values() for name in names]
    assert len(named) == len(set(named))
    context = click.Context(run, help_option_names=["-h", "--help"])
    assert isinstance(run, SectionedCommand)
    found = run.sections(context)
    assert [option.opts for option in found["Other"]] == [["-h", "--help"]]
    assert sum(len(options) for options in found.values()) == len(named) + 1

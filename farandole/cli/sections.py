"""The options of a command under headings, for commands that have many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

_REST = "Other"


class SectionedCommand(click.Command):
    """Shows its options section by section. Whatever is in none of them comes last."""

    def __init__(
        self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections or {}

    def sections(self, context: click.Context) -> dict[str, list[click.Option]]:
        """The options that are shown, under their headings."""
        headings = {name: title for title, names in self._sections.items() for name in names}
        found: dict[str, list[click.Option]] = {title: [] for title in (*self._sections, _REST)}
        for option in self.get_params(context):
            if isinstance(option, click.Option) and not option.hidden:
                titles = (headings[name] for name in option.opts if name in headings)
                found[next(titles, _REST)].append(option)
        return {title: options for title, options in found.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self.sections(ctx).items():
            records = [option.get_help_record(ctx) for option in options]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])

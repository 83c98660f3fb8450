"""Says where the page is, and opens it if asked to."""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

import click


@contextmanager
def announce(folder: Path, *, browser: bool) -> Iterator[Callable[[str], None]]:
    """A function that takes the address.

    A browser gets the address from a file that only this user can read: as an argument of the
    browser's process, everybody on the machine could read the token.
    """
    with tempfile.TemporaryDirectory(prefix="farandole-watch-") as private:

        def ready(address: str) -> None:
            click.echo(f"watching {folder}: {address}")
            click.echo("Ctrl-C ends it.")
            if browser:
                page = Path(private) / "open.html"
                page.write_text(f'<meta http-equiv="refresh" content="0; url={escape(address)}">')
                if not webbrowser.open(page.as_uri()):
                    click.echo("no browser could be opened; open the address yourself", err=True)

        yield ready

"""What a race finds out before its first lane: that none of its lanes must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farandole.environment import TRANSPORT
from farandole.errors import UserError
from farandole.launch.servers import check_replicas
from farandole.layout import Layout
from farandole.race.runner import Entry
from farandole.sync import parse
from farandole.topology import Topology
from farandole.train.settings import (
    Settings,
    check_goes_with,
    check_workers,
    pretended_hosts,
    read_layout,
)


def check_entries(
    entries: Sequence[Entry], pretended: str | None, device: str, environ: Mapping[str, str]
) -> None:
    """Raises `UserError` for a lane that cannot work, before the first one is started.

    `device` is the kind of device that workers get here. What the user has set in the environment
    holds for every lane, unless the lane says otherwise.
    """
    settings = Settings.from_environ(environ)
    if settings.transport == "mpi":
        raise UserError(
            f"{TRANSPORT}=mpi needs ranks that mpirun has started, and a race starts its own. "
            f"Unset {TRANSPORT}."
        )
    for entry in entries:
        try:
            asked = None if entry.serial else pretended
            _check_entry(entry, settings, asked or settings.pretend_hosts, device)
        except UserError as error:
            raise UserError(f"lane {entry.name}: {error}") from None


def _check_entry(entry: Entry, settings: Settings, pretended: str | None, device: str) -> None:
    layout = read_layout(entry.place) if entry.place else settings.layout
    strategy = parse(entry.sync) if entry.sync else settings.sync
    if pretended is None:
        topology = Topology.single(entry.workers)
    else:
        topology = pretended_hosts(pretended, entry.workers)
    if layout is not None:
        check_workers(layout, entry.workers)
        if strategy is not None:
            check_goes_with(layout, strategy)
    if strategy is not None and layout in (None, Layout()):
        strategy.check_place(topology, device)


def check_servers(entries: Sequence[Entry], servers: int | None, replicas: int | None) -> None:
    """Before the first lane starts: a later one would fail on it."""
    if any(entry.needs_servers for entry in entries):
        check_replicas(1 if servers is None else servers, replicas)
        return
    for option, value in (("--servers", servers), ("--replicas", replicas)):
        if value is not None:
            raise UserError(
                f"{option} {value}: no strategy in this race needs parameter servers. Leave it "
                "out, or add one that does, such as --sync server."
            )

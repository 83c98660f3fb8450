"""What a race finds out before its first lane: that none of its lanes must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farandole.environment import CHECKPOINT, TRANSPORT
from farandole.errors import UserError
from farandole.launch.placement.placement import HostOptions, place
from farandole.launch.servers import check_replicas
from farandole.layout import Layout
from farandole.race.runner import Entry
from farandole.sync import parse
from farandole.topology import Topology
from farandole.train.checkpoint.automatic.policy import parse_checkpoints
from farandole.train.settings import (
    Settings,
    check_goes_with,
    check_workers,
    pretended_hosts,
    read_layout,
)

ON_THIS_HOST = HostOptions()


def check_entries(
    entries: Sequence[Entry],
    pretended: str | None,
    device: str,
    environ: Mapping[str, str],
    where: HostOptions = ON_THIS_HOST,
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
            asked = (None if entry.serial else pretended) or settings.pretend_hosts
            placement = place(where, entry.workers, environ)
            if asked is not None:
                topology = pretended_hosts(asked, entry.workers)
            elif placement is not None:
                topology = placement.topology
            else:
                topology = Topology.single(entry.workers)
            _check_entry(entry, settings, topology, device)
            if placement is not None and placement.others:
                _check_other_hosts(entry, pretended, placement.others)
        except UserError as error:
            raise UserError(f"lane {entry.name}: {error}") from None


def _check_entry(entry: Entry, settings: Settings, topology: Topology, device: str) -> None:
    layout = read_layout(entry.place) if entry.place else settings.layout
    strategy = parse(entry.sync) if entry.sync else settings.sync
    if layout is not None:
        check_workers(layout, entry.workers)
        if strategy is not None:
            check_goes_with(layout, strategy)
    if strategy is not None and layout in (None, Layout()):
        strategy.check_place(topology, device)


def _check_other_hosts(entry: Entry, pretended: str | None, others: Sequence[str]) -> None:
    if entry.needs_servers:
        raise UserError(
            f"{entry.sync} needs parameter servers, which a race starts on this host for workers "
            f"of this host, and workers are on {', '.join(others)}. Leave this lane out, or run "
            "its script by itself: farandole run --servers tcp://ADDRESS:PORT --key-file FILE."
        )
    if pretended is not None and not entry.serial:
        raise UserError(
            f"--pretend-hosts {pretended} is for workers of one host, and there are real ones: "
            f"{', '.join(others)}. Leave one of the two out."
        )


def checked_policy(text: str | None, environ: Mapping[str, str]) -> str | None:
    """What each lane is told about checkpoints, in its short form; None: nothing.

    Raises `UserError` for a place that all lanes would share: one would resume from another's.
    """
    given = text if text is not None else environ.get(CHECKPOINT)
    policy = parse_checkpoints(given) if given else None
    if policy is not None and policy.to is not None:
        option = "--checkpoint" if text is not None else CHECKPOINT
        raise UserError(
            f"{option} {given}: all lanes would save to {policy.to}, and each would resume from "
            "the checkpoints of the one before. Leave out to=, so that each saves in its own "
            "folder."
        )
    return str(policy) if text is not None else None


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

"""The options of `farandole race`, and what a resumed race takes from its record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from farandole.errors import UserError
from farandole.launch.placement.placement import HostOptions
from farandole.race.record import RaceRecord

# All lanes must have these in common, or they could not be compared.
_COMMON = (
    *("workers", "pretend_hosts", "link", "servers", "replicas", "checkpoint"),
    *("seed", "stop_at_target", "budget", "halve", "trace"),
)


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """As given; None or False: not given. `command` is the script and its arguments."""

    command: tuple[str, ...]
    layouts: tuple[str, ...] = ()
    syncs: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    workers: int | None = None
    serial: bool = False
    target: str | None = None
    runs: Path
    seed: int | None = None
    seeds: str | None = None
    price: float | None = None
    where: HostOptions
    pretend_hosts: str | None = None
    link: str | None = None
    servers: int | None = None
    replicas: int | None = None
    checkpoint: str | None = None
    stop_at_target: bool = False
    budget: float | None = None
    halve: bool = False
    trace: bool = False
    stall: float | None = None
    grace: float
    resume: Path | None = None

    def settings(self) -> dict[str, Any]:
        """What is kept in the record."""
        where = {key: _plain(value) for key, value in asdict(self.where).items()}
        return {**{name: getattr(self, name) for name in _COMMON}, "where": where}

    def resumed(self, record: RaceRecord) -> RaceOptions:
        """With the settings of the race that is resumed. Raises `UserError` for another one."""
        if self.command and self.command != record.command:
            raise UserError(
                f"the race in {self.resume} ran {' '.join(record.command)!r}, and this is "
                f"{' '.join(self.command)!r}. Leave the script out, or start a new race."
            )
        given = {name: getattr(self, name) for name in _COMMON}
        for name, value in given.items():
            kept = record.settings.get(name)
            if value not in (None, False) and value != kept:
                raise UserError(
                    f"--{name.replace('_', '-')} {value}: the race in {self.resume} ran with "
                    f"{'none' if kept in (None, False) else kept}, and lanes that differ in it "
                    "cannot be compared. Leave it out, or start a new race."
                )
        if self.where != HostOptions():
            raise UserError("the hosts of a race that is resumed are those it began with.")
        where = record.settings["where"]
        kept_values: dict[str, Any] = {name: record.settings.get(name) for name in _COMMON}
        return replace(
            self,
            command=record.command,
            target=self.target or record.target,
            price=record.price if self.price is None else self.price,
            where=_host_options(where),
            **kept_values,
        )


def _host_options(kept: dict[str, Any]) -> HostOptions:
    paths = {"hostfile", "ssh_identity_file"}
    values: dict[str, Any] = {f.name: kept.get(f.name) for f in fields(HostOptions)}
    values = {
        key: Path(value) if key in paths and value else value for key, value in values.items()
    }
    values["network_interfaces"] = tuple(values["network_interfaces"] or ())
    return HostOptions(**values)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def check_price(price: float | None) -> None:
    if price is not None and not 0 <= price < float("inf"):
        raise UserError(f"--price {price:g}: give the price of a worker-hour, such as 2.5.")

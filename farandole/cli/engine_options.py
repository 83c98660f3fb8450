"""The options of `farandole run --on`: which engine starts the workers, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from farandole.errors import UserError
from farandole.launch.engines.catalog import ENGINES, LOCAL, SSH, Engine, find_engine
from farandole.launch.placement.placement import HostOptions

_COMMON = ("on", "nodes", "per_node")
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)

_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--nodes",), {"type": int, "metavar": "N", "help": "number of nodes. [1]"}),
    (("--per-node",), {"type": int, "metavar": "M", "help": "number of workers of a node. [1]"}),
    (
        ("--cpus",),
        {"type": int, "metavar": "C", "help": "number of cores of each worker. [1 on Ray]"},
    ),
    (
        ("--gpus",),
        {
            "type": int,
            "metavar": "G",
            "help": "number of GPUs of each node. [none; on Ray one per worker, if there are]",
        },
    ),
    (
        ("--dry-run",),
        {"is_flag": True, "help": "print the batch script or the command, and start nothing."},
    ),
    (
        ("--output",),
        {
            "type": click.Path(path_type=Path, dir_okay=False),
            "metavar": "FILE",
            "help": "file to write the batch script or the manifest to. [in the run's folder; "
            "standard output]",
        },
    ),
    (("--partition",), {"metavar": "NAME", "help": "partition of the batch job."}),
    (
        ("--time", "time_limit"),
        {"metavar": "LIMIT", "help": "time limit of the batch job, as in 2:30:00."},
    ),
    (("--account",), {"metavar": "NAME", "help": "account of the batch job."}),
    (
        ("--slurm-option",),
        {
            "multiple": True,
            "metavar": "OPTION",
            "help": "further option of sbatch, such as --slurm-option=--qos=high. Repeat it for "
            "several options.",
        },
    ),
    (
        ("--ray-address",),
        {"metavar": "ADDRESS", "help": "address of the cluster. [RAY_ADDRESS, or auto]"},
    ),
    (("--image",), {"metavar": "IMAGE", "help": "container image with the script. Required."}),
    (
        ("--kind",),
        {"metavar": "KIND", "help": "job (an Indexed Job) or pytorchjob (Kubeflow's). [job]"},
    ),
    (("--namespace",), {"metavar": "NAME", "help": "namespace of the objects. [kubectl's]"}),
    (("--memory",), {"metavar": "SIZE", "help": "memory of each node, such as 16Gi."}),
    (("--shm",), {"metavar": "SIZE", "help": "largest size of /dev/shm. [half of the memory]"}),
    (
        ("--volume",),
        {
            "multiple": True,
            "metavar": "CLAIM:PATH",
            "help": "PersistentVolumeClaim, and where it is mounted. Repeat it for several.",
        },
    ),
    (
        ("--token-secret",),
        {
            "metavar": "NAME[/KEY]",
            "help": "Secret with the token that the workers show to each other. [key: token]",
        },
    ),
)


def engine_options() -> Callable[[Any], Any]:
    """--on, and every engine's options. The help of each says which engines take it."""

    def decorate(command: Any) -> Any:
        for words, settings in reversed(_OPTIONS):
            name = (words[-1] if len(words) > 1 else words[0]).lstrip("-").replace("-", "_")
            takers = [each for each, engine in ENGINES.items() if name in engine.options]
            where = f"With --on {', '.join(takers)}: " if takers else "With --on: "
            shown = {**settings, "help": where + settings["help"]}
            command = click.option(*words, **shown)(command)
        meanings = "; ".join(f"{name}: {engine.meaning}" for name, engine in ENGINES.items())
        return click.option(
            "--on",
            metavar="ENGINE",
            help=f"What starts the workers. {meanings}. [local, or ssh where hosts are given]",
        )(command)

    return decorate


class ChosenEngine:
    """The engine that was asked for, with the options that are its own.

    Takes them out of `options`. Raises `UserError` for an unknown engine, and for options of other
    engines.
    """

    def __init__(self, context: click.Context, options: dict[str, Any]) -> None:
        self._context = context
        given = given_names(context)
        own = {name for engine in ENGINES.values() for name in engine.options}
        values = {name: options.pop(name) for name in (*_COMMON, *sorted(own)) if name in options}
        self.name: str = values["on"] or LOCAL
        self.engine: Engine = find_engine(self.name)
        self.nodes: int | None = values["nodes"]
        self.per_node: int | None = values["per_node"]
        self.settings = {name: values[name] for name in given if name in self.engine.options}
        self._check(given & values.keys())

    @property
    def is_started_here(self) -> bool:
        """Whether `farandole run` itself starts the workers."""
        return self.engine.module is None

    @property
    def is_counted(self) -> bool:
        """Whether the user has said how many nodes or workers there shall be."""
        return self.nodes is not None or self.per_node is not None

    def check_hosts(self, where: HostOptions) -> None:
        """Raises `UserError` where --on local or --on ssh does not go with the hosts."""
        asked = self._context.params["on"]
        named = where.hosts or where.hostfile
        if asked == LOCAL and named:
            raise UserError(f"--on local and hosts ({named}): leave one of them out.")
        if asked == SSH and not named:
            raise UserError("--on ssh: name the hosts, as in -H node1:4,node2:4")

    def _check(self, given: set[str]) -> None:
        known = {"on", *self.engine.options, *(() if self.is_started_here else _COMMON)}
        for name in sorted(given - known):
            takers = [
                each
                for each, engine in ENGINES.items()
                if name in engine.options or (name in _COMMON and engine.module is not None)
            ]
            hint = " Give the number of workers with -n." if name in _COMMON else ""
            raise UserError(
                f"{self._spelling(name)} has no meaning under --on {self.name}; it is for --on "
                f"{', '.join(takers)}.{hint}"
            )
        for option, count in (("--nodes", self.nodes), ("--per-node", self.per_node)):
            if count is not None and count < 1:
                raise UserError(f"{option} {count}: give 1 or more.")
        for name in ("cpus", "gpus"):
            if self.settings.get(name, 1) < (0 if name == "gpus" else 1):
                raise UserError(f"--{name} {self.settings[name]}: give a number of them.")

    def counts(self, workers: int | None) -> tuple[int, int]:
        """Nodes, and workers of each; `workers` is what -n says. Raises `UserError`."""
        if workers is None:
            return self.nodes or 1, self.per_node or 1
        if not self.engine.counts_workers:
            raise UserError(
                f"-n {workers} under --on {self.name}: say where they are, as in "
                f"--nodes 1 --per-node {workers}"
            )
        if self.is_counted:
            raise UserError(f"-n {workers} and --nodes or --per-node: give one of them.")
        return 1, workers

    def check_options(self, allowed: Iterable[str]) -> None:
        """Raises `UserError` for options of `farandole run` that this engine cannot carry out."""
        given = given_names(self._context)
        for name in sorted(given - {*allowed, *_COMMON, *self.engine.options}):
            raise UserError(
                f"{self._spelling(name)} is carried out by Farandole's own launcher, and under "
                f"--on {self.name} another one starts the workers. Leave it out."
            )

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises `UserError` if one of these options is given."""
        for name in sorted(given_names(self._context) & set(names)):
            raise UserError(f"{self._spelling(name)}: --on {self.name} {why}. Leave it out.")

    def as_given(self, name: str) -> Any:
        """The value of any option of the command."""
        return self._context.params[name]

    def words(self, without: Iterable[str]) -> tuple[str, ...]:
        """The options and arguments as they were given, so that another `farandole run` gets the
        same. Not --on, nor the engine's own, nor those `without`."""
        left_out = {*without, *_COMMON, *self.engine.options}
        return command_words(self._context, left_out)

    def _spelling(self, name: str) -> str:
        (parameter,) = (each for each in self._context.command.params if each.name == name)
        return _longest(parameter)


def given_names(context: click.Context) -> set[str]:
    """The parameters that the user has given, by their names."""
    return {
        str(parameter.name)
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) in _GIVEN
    }


def command_words(context: click.Context, left_out: Iterable[str]) -> tuple[str, ...]:
    """The words of the command line, from the values that were parsed."""
    options: list[str] = []
    arguments: list[str] = []
    wanted = given_names(context) - set(left_out)
    for parameter in context.command.params:
        if parameter.name not in wanted:
            continue
        value: Any = context.params[str(parameter.name)]
        several = parameter.multiple or parameter.nargs == -1
        values = [str(each) for each in value] if several else [str(value)]
        if isinstance(parameter, click.Argument):
            arguments += values
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            options.append(_longest(parameter))
        else:
            for each in values:
                options += _word(_longest(parameter), each)
    dashes = ["--"] if arguments and arguments[0].startswith("-") else []
    return (*options, *dashes, *arguments)


def _word(option: str, value: str) -> list[str]:
    return [f"{option}={value}"] if option.startswith("--") else [option, value]


def _longest(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len)

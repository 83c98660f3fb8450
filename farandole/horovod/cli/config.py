"""Reads `--config-file`: flags in Horovod's YAML, which is two levels of names.

params:
  fusion_threshold_mb: 32
stall_check:
  enabled: false
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from farandole.errors import UserError, nearest
from farandole.horovod.cli.flags import LOG_LEVELS


def _whether(text: str) -> bool:
    return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[
        text.lower()
    ]


def _not(text: str) -> bool:
    return not _whether(text)


def _level(text: str) -> str:
    return LOG_LEVELS[LOG_LEVELS.index(text.upper())]


_FLAGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "params.fusion_threshold_mb": ("fusion_threshold_mb", int),
    "params.cycle_time_ms": ("cycle_time_ms", float),
    "params.cache_capacity": ("cache_capacity", int),
    "params.hierarchical_allreduce": ("hierarchical_allreduce", _whether),
    "params.hierarchical_allgather": ("hierarchical_allgather", _whether),
    "autotune.enabled": ("autotune", _whether),
    "autotune.log_file": ("autotune_log_file", Path),
    "autotune.warmup_samples": ("autotune_warmup_samples", int),
    "autotune.steps_per_sample": ("autotune_steps_per_sample", int),
    "autotune.bayes_opt_max_samples": ("autotune_bayes_opt_max_samples", int),
    "autotune.gaussian_process_noise": ("autotune_gaussian_process_noise", float),
    "timeline.filename": ("timeline_filename", Path),
    "timeline.mark_cycles": ("timeline_mark_cycles", _whether),
    "stall_check.enabled": ("no_stall_check", _not),
    "stall_check.warning_time_seconds": ("stall_check_warning_time_seconds", int),
    "stall_check.shutdown_time_seconds": ("stall_check_shutdown_time_seconds", int),
    "library_options.mpi_threads_disable": ("mpi_threads_disable", _whether),
    "library_options.num_nccl_streams": ("num_nccl_streams", int),
    "library_options.thread_affinity": ("thread_affinity", int),
    "library_options.gloo_timeout_seconds": ("gloo_timeout_seconds", int),
    "logging.level": ("log_level", _level),
    "logging.with_timestamp": ("log_with_timestamp", _whether),
    "logging.hide_timestamp": ("log_with_timestamp", _not),
}


def with_config_file(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, with what the file adds to them. Raises `UserError` naming the line at fault."""
    path: Path | None = flags["config_file"]
    if path is None:
        return dict(flags)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config-file {path} cannot be read: {error}.") from error
    added: dict[str, Any] = {}
    for where, name, value in _entries(path, text):
        if name not in _FLAGS:
            raise UserError(f"{where}: there is no setting {name!r}. {nearest(name, _FLAGS)}")
        flag, read = _FLAGS[name]
        try:
            added[flag] = read(value)
        except (ValueError, KeyError):
            raise UserError(f"{where}: {name} cannot be {value!r}.") from None
    return {name: added.get(name) if given is None else given for name, given in flags.items()}


def _entries(path: Path, text: str) -> Iterator[tuple[str, str, str]]:
    """Where each setting is, its full name, and its value as written."""
    # Nodes, and not `safe_load`: they know their lines, which the messages name. A safe loader
    # parses both, and nothing is constructed from nodes.
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line} is no YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}.") from error
    if root is None:
        return
    for section, settings in _items(path, root):
        for name, value in _items(path, settings):
            where = f"{path}, line {name.start_mark.line + 1}"
            if not isinstance(value, yaml.ScalarNode):
                raise UserError(f"{where}: {name.value} must be a single value.")
            full_name = f"{section.value}.{name.value}".replace("-", "_")
            yield where, full_name, value.value


def _items(path: Path, node: yaml.Node) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The names in a mapping, and what belongs to each."""
    if isinstance(node, yaml.ScalarNode) and not node.value:
        return []  # a section without settings
    if not isinstance(node, yaml.MappingNode) or not all(
        isinstance(name, yaml.ScalarNode) for name, _ in node.value
    ):
        raise UserError(
            f"{path}, line {node.start_mark.line + 1}: here must be sections such as `params:`, "
            "and in them settings such as `cycle_time_ms: 2`."
        )
    found: list[tuple[yaml.ScalarNode, yaml.Node]] = node.value
    return found

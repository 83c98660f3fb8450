"""Finds a rule or a question that users have written, in modules that they have allowed.

A server imports what clients name over a socket, so it must not import just anything: whoever
started it has said which modules are meant. Only what is defined in such a module is found, not
what it happens to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from farandole.errors import UserError, nearest


def find(path: str, allowed: Sequence[str], *, what: str, known: Iterable[str]) -> object:
    """What `package.module.Name` names. `known` are the names without a dot, for the messages."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UserError(
            f"there is no {what} {path!r}. {nearest(path, known)} One of your own is written with "
            f"its module, such as mymodule.{path or 'name'}."
        )
    if module not in allowed:
        listed = ", ".join(sorted(allowed)) or "none"
        raise UserError(
            f"the {what} {path!r} is in the module {module!r}, which the servers may not import. "
            f"Allowed: {listed}. Start them with --functions {module}, or "
            f"Cluster(functions=[{module!r}])."
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise UserError(
            f"the {what} {path!r}: {module!r} cannot be imported: {error}. It must be where the "
            "servers look for modules, such as the folder that they are started in."
        ) from error
    if getattr(found, "__module__", None) != module:
        raise UserError(
            f"the {what} {path!r}: {module!r} defines no {name!r}. Write the module in which it is "
            "defined, not one that imports it."
        )
    return found

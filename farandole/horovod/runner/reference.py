"""How a worker finds a function: by the module it is in, or the script, and its name there."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from farandole.environment import HOROVOD_TASK
from farandole.errors import UserError

_SCRIPT_NAME = "__farandole_script__"  # so that `if __name__ == "__main__":` is not meant


@dataclass(frozen=True)
class Reference:
    """Either `module` or `script` says where `name` is; `search` is where modules are found."""

    name: str
    module: str | None
    script: str | None
    search: tuple[str, ...]

    @classmethod
    def to(cls, func: Callable[..., Any]) -> Reference:
        """Raises `UserError` for a function that another process cannot import."""
        name = getattr(func, "__qualname__", None)
        home = sys.modules.get(getattr(func, "__module__", None) or "")
        if name is None or home is None or "<" in name:
            _refuse(func, "it is made on the spot")
        try:
            same = attrgetter(name)(home) is func
        except AttributeError:
            same = False
        if not same:
            _refuse(func, f"{home.__name__}.{name} is something else")
        search = tuple(str(Path(entry).absolute()) for entry in sys.path)
        if home.__name__ != "__main__":
            return cls(name, home.__name__, None, search)
        spec = getattr(home, "__spec__", None)
        if spec is not None:  # python -m
            return cls(name, spec.name, None, search)
        file = getattr(home, "__file__", None)
        if file is None:
            _refuse(func, "what is typed into an interpreter or a notebook is in no file")
        return cls(name, None, str(Path(file).absolute()), search)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def find(self) -> Callable[..., Any]:
        """In a worker."""
        sys.path += [entry for entry in self.search if entry not in sys.path]
        os.environ[HOROVOD_TASK] = self.name
        try:
            if self.script is not None:
                home: Any = SimpleNamespace(**runpy.run_path(self.script, run_name=_SCRIPT_NAME))
            else:
                home = importlib.import_module(self.module or "")
        finally:
            del os.environ[HOROVOD_TASK]
        found: Callable[..., Any] = attrgetter(self.name)(home)
        return found


def refuse_inside_a_worker() -> None:
    """A script that calls `horovod.run()` when it is imported would start workers without end."""
    if HOROVOD_TASK in os.environ:
        raise UserError(
            "horovod.run() is called while a worker imports the script. Put the call below "
            'if __name__ == "__main__":'
        )


def _refuse(func: object, why: str) -> NoReturn:
    raise UserError(
        f"horovod.run() cannot hand {func!r} to the workers: {why}, so they cannot import it by "
        "name. Define it with def, at the top level of a module or of the script, and give it what "
        "it needs by args= and kwargs=."
    )

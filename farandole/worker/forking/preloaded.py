"""Modules that were imported before a script began, and that it finds when it imports them.

Until then they are not in `sys.modules`, as in any fresh process. At that moment the script's
variables are compared with those that it was started with: libraries read some of them when they
are imported, and never again. (`forked.can_run` has compared those with the server's own.) If the
script has changed any, the worker begins again as a fresh process (`afresh`), or says what comes
too late.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from farandole.worker.forking.afresh import Beginning

# What torch, NumPy and the libraries below them read when they are loaded.
_READ_EARLY = re.compile(
    r"OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|BLIS_|VECLIB_|NUMEXPR_|DNNL_|ONEDNN_|ATEN_|NPY_|TORCH|PYTORCH_"
)
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the one that torch heeds first
_NOT_HIDDEN = {"farandole"}  # reads no variables when it is imported


class Preloaded:
    """A finder, and the loader of what it finds."""

    def __init__(
        self,
        modules: dict[str, ModuleType],
        started_with: Mapping[str, str],
        beginning: Beginning,
    ) -> None:
        self._modules = modules
        self._started_with = started_with
        self._beginning = beginning
        self._reported: set[str] = set()

    @classmethod
    def hide(
        cls, before: Collection[str], started_with: Mapping[str, str], beginning: Beginning
    ) -> None:
        """Takes all modules from `sys.modules` that were not there `before`, but the library's."""
        kept = sys.stdlib_module_names | {_root(name) for name in before} | _NOT_HIDDEN
        hidden = {name: module for name, module in sys.modules.items() if _root(name) not in kept}
        for name in hidden:
            del sys.modules[name]
        sys.meta_path.insert(0, cls(hidden, started_with, beginning))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(name)
        if module is None or module.__spec__ is None:
            return None
        known = module.__spec__
        spec = ModuleSpec(name, self, origin=known.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location, spec.cached = known.has_location, known.cached
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Checked at the import: only now is it certain that the libraries are wanted, and the
        # variables are what the libraries would have read at this moment.
        changed = self._changed()
        if changed and self._beginning.can_start_again():
            self._start_again(changed)
        module = self._modules[spec.name]
        spec.loader_state = module.__spec__, module.__dict__.get("__loader__")
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed long ago. Brings back all of its package."""
        assert module.__spec__ is not None
        module.__spec__, module.__loader__ = module.__spec__.loader_state
        package = _root(module.__name__)
        for name in [name for name in self._modules if package in ("torch", _root(name))]:
            # All modules of the package at once. If its parts were imported one by one, some would
            # be new objects and others old ones, and classes would exist twice.
            sys.modules[name] = self._modules.pop(name)  # torch has imported all others
        if package == "torch":
            self._beginning.end()
        self._tell()

    def _changed(self) -> set[str]:
        names = {name for name in {*os.environ, *self._started_with} if _READ_EARLY.match(name)}
        return {name for name in names if os.environ.get(name) != self._started_with.get(name)}

    def _start_again(self, changed: Collection[str]) -> None:
        if os.environ.get("RANK") == "0":
            sys.stderr.write(
                f"farandole: note: the script sets {', '.join(sorted(changed))} itself, before it "
                "imports torch. So its workers start again as fresh processes; they start sooner "
                "if it is set outside of the script.\n"
            )
        self._beginning.start_again()

    def _tell(self) -> None:
        changed = self._changed() - self._reported
        self._reported |= changed
        threads = [name for name in _THREADS if name in changed and _is_number(name)]
        if threads:
            sys.modules["torch"].set_num_threads(int(os.environ[threads[0]]))
        ignored = sorted(changed - set(threads))
        if ignored:
            sys.stderr.write(
                f"farandole: note: the script sets {', '.join(ignored)} itself, and torch was "
                "imported before (workers are forked from one process that has it). Set it as the "
                "script's first act, or outside of it, or start with --no-fork.\n"
            )


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_number(variable: str) -> bool:
    """Whether torch is here, and can be told of it."""
    return "torch" in sys.modules and os.environ.get(variable, "").isdecimal()

"""Plain values that a model's code reads or changes beside tensors: attributes, globals, closures.

A recorded forward has them as they were. So whoever records compares them before and after: code
that changes one cannot be recorded. And before every step they are compared with what they were
when the model was recorded, because a script may change them too: `model.temperature = 0.9`.

Functions that a forward calls are followed, into other files of the user too (see `user_code`).

Only modules whose inside was recorded matter. All others run their own code, with whatever their
attributes are by then.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from farandole.layout.recording.state.code_names import (
    function_behind,
    mentioned_names,
    own_classes,
)
from farandole.layout.recording.state.code_values import (
    ABSENT,
    PLAIN,
    Change,
    Content,
    Identity,
    WrittenTensor,
    content_of,
    key_of,
    same,
    version_of,
)
from farandole.layout.recording.state.user_code import is_of_the_user, is_record, names_in

_OF_TORCH = (  # in every module; what of it matters is looked at by itself
    "training",
    "_compiled_call_impl",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
)
_DEPTH = 3  # of objects in objects
_MOST_SEEN = 5000  # functions and objects
_MOST_ENTRIES = 1000  # of a list or dictionary that are looked at


class CodeState:
    """All that is now. `modules`: by their names in the model. `tensors`: by their values."""

    def __init__(self, modules: Mapping[str, nn.Module], tensors: Iterable[torch.Tensor] = ()):
        self._modules = modules
        self._tensors = list(tensors)
        self._seen: dict[int, Any] = {}  # by identity, and kept so that no other gets it
        self._kinds: set[int] = set()  # of modules
        self._contents: list[Content] = []
        self._undo: list[Callable[[], None]] = []
        self._hooks: list[Any] = []
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        self._settings: list[tuple[Callable[[], Any], Any]] = []  # how to look a value up
        self._versions = [WrittenTensor(tensor, version_of(tensor)) for tensor in self._tensors]
        self.values: dict[str, Any] = {}
        for tensor in self._tensors:
            self.values[f"a tensor of {tuple(tensor.shape)} that forward reads, {id(tensor)}"] = (
                WrittenTensor(tensor, version_of(tensor))
            )
        for name, module in modules.items():
            self._add_module(f"{name}." if name else "", module)
        self._hook_count = sum(map(len, self._hooks))

    def is_the_same(self) -> bool:
        """Whether nothing is different, at a glance; if it says no, `changes` knows better."""
        return (
            sum(map(len, self._hooks)) == self._hook_count
            # Called before every step, so it compares identities and lengths only. A false alarm
            # costs one full comparison; a change cannot be missed, since plain values are
            # immutable.
            and all(content.is_the_same() for content in self._contents)
            and all(look_up() is value for look_up, value in self._settings)
            and all(frozenset(map(key_of, each)) == held for each, held in self._sets)
            and all(version_of(tensor) == version for tensor, version in self._versions)
        )

    def changes(self) -> Iterator[Change]:
        """What is different now."""
        # Looked up from scratch: what was added since is found too.
        now = CodeState(self._modules, self._tensors).values
        for name in [*self.values, *(name for name in now if name not in self.values)]:
            before, after = self.values.get(name, ABSENT), now.get(name, ABSENT)
            if not same(before, after):
                yield Change(name, before, after)

    def matters(self, change: Change) -> bool:
        """Whether the code may read it: what a script adds for itself, such as `model.epoch`, is
        nowhere in the code of the module that it is added to."""
        if change.before is not ABSENT:
            return True
        path = change.name.removeprefix("len(")
        owners = [name for name in self._modules if path.startswith(f"{name}.") or not name]
        owner = max(owners, key=len, default=None)
        if owner is None:
            return True
        parts = re.split(r"[^\w]+", path.removeprefix(f"{owner}."))
        return not mentioned_names(type(self._modules[owner])).isdisjoint(parts)

    def put_back(self) -> None:
        """Attributes, and what lists and dictionaries held, are again what they were."""
        for container, copy, _ in self._contents:
            if isinstance(container, (list, deque)):
                container.clear()
                container.extend(copy)
            else:
                for key in [key for key in container if key not in copy]:
                    del container[key]
                container.update(copy)
        for undo in self._undo:
            undo()

    def _add_module(self, path: str, module: nn.Module) -> None:
        held = vars(module)
        self._contents.append(content_of(held))
        for name, value in held.items():
            if name in _OF_TORCH:
                continue
            if name in ("_parameters", "_buffers", "_modules"):
                self._contents.append(content_of(value))
                for key, each in value.items():
                    self.values[path + key] = Identity(each)
            elif name.endswith("_hooks") or "_hooks_" in name:
                self.values[path + name] = tuple(value) if isinstance(value, dict) else value
                if isinstance(value, dict):
                    self._hooks.append(value)
            else:
                self._add(path + name, value, _DEPTH)
        if id(type(module)) not in self._kinds:
            self._kinds.add(id(type(module)))
            mentioned = mentioned_names(type(module))
            for kind in own_classes(type(module)):
                self._add_class(kind, mentioned)

    def _add_class(self, kind: type, mentioned: set[str]) -> None:
        """May come twice, with what other classes that are made of it mention."""
        for name, value in list(vars(kind).items()):
            if name.startswith("__") and name != "__call__":
                continue
            function = function_behind(value)
            if function is not None:
                if name in mentioned:  # others may read what a script counts in
                    self._add_function(f"{kind.__qualname__}.{name}", function)
            elif isinstance(value, (*PLAIN, list, dict, tuple, set, torch.Tensor)):
                self._undo.append(partial(_set_back, kind, name, value))
                self._settings.append((partial(vars(kind).get, name), value))
                self._add(f"{kind.__qualname__}.{name}", value, 1)

    def _add_function(self, name: str, function: FunctionType) -> None:
        # Functions may call each other in circles, and may lead into very large programs.
        if id(function) in self._seen or len(self._seen) > _MOST_SEEN:
            return
        self._seen[id(function)] = function
        mentioned = names_in(function.__code__)
        self._add_globals(function.__globals__, function.__module__, mentioned)
        for used, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            self._settings.append((partial(getattr, cell, "cell_contents", None), value))
            if isinstance(value, PLAIN):
                self._undo.append(partial(setattr, cell, "cell_contents", value))
            self._add(f"{used} of {name}", value, 1)

    def _add_globals(self, known: dict[str, Any], module: str, mentioned: set[str]) -> None:
        """What code in a module reads of it, and of other modules and classes of the user."""
        for used in mentioned & known.keys():
            value = known[used]
            if isinstance(value, FunctionType):
                if value.__module__ == module or is_of_the_user(value.__module__):
                    self._add_function(used, value)
            elif isinstance(value, (*PLAIN, list, dict, set, torch.Tensor)) or is_record(value):
                self._undo.append(partial(known.__setitem__, used, value))
                self._settings.append((partial(known.get, used), value))
                self._add(f"{known.get('__name__', '')}.{used}", value, 1)
                if is_record(value):
                    self._add_used_class(type(value), mentioned)
            elif isinstance(value, ModuleType):
                if is_of_the_user(value.__name__):
                    self._add_globals(vars(value), value.__name__, mentioned - {used})
            elif isinstance(value, type) and is_of_the_user(value.__module__):
                self._add_used_class(value, mentioned)

    def _add_used_class(self, kind: type, mentioned: set[str]) -> None:
        """A class that code mentions, such as one of settings. Modules are looked at elsewhere."""
        if id(kind) in self._seen or issubclass(kind, nn.Module):
            return
        self._seen[id(kind)] = kind
        for name in mentioned & vars(kind).keys():
            value = vars(kind)[name]
            function = function_behind(value)
            if function is not None:
                self._add_function(f"{kind.__qualname__}.{name}", function)
            elif isinstance(value, (*PLAIN, list, dict, tuple, set, torch.Tensor)):
                self._undo.append(partial(_set_back, kind, name, value))
                self._settings.append((partial(vars(kind).get, name), value))
                self._add(f"{kind.__qualname__}.{name}", value, 1)

    def _add(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            self.values[path] = value
        elif isinstance(value, (set, frozenset)):
            self.values[path] = frozenset(map(key_of, value))
            self._sets.append((value, frozenset(map(key_of, value))))
        else:  # a tensor too: a recording looks up its values
            self.values[path] = Identity(value)
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                self._add_function(path, function)
            elif depth > 0 and id(value) not in self._seen and not isinstance(value, torch.Tensor):
                self._seen[id(value)] = value
                self._add_content(path, value, depth)

    def _add_content(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple, deque)):
            if not isinstance(value, tuple):
                self._contents.append(content_of(value))
            self.values[f"len({path})"] = len(value)
            for index, each in zip(range(_MOST_ENTRIES), value, strict=False):
                self._add(f"{path}[{index}]", each, depth - 1)
        elif isinstance(value, dict):
            self._contents.append(content_of(value))
            self.values[f"len({path})"] = len(value)
            for _, (key, each) in zip(range(_MOST_ENTRIES), list(value.items()), strict=False):
                self._add(f"{path}[{key!r}]", each, depth - 1)
        elif not isinstance(value, (nn.Module, type, FunctionType)) and hasattr(value, "__dict__"):
            if type(value).__module__.split(".")[0] == "torch":
                return
            held = vars(value)
            self._contents.append(content_of(held))
            for name, each in list(held.items()):
                self._add(f"{path}.{name}", each, depth - 1)


def _set_back(kind: type, name: str, value: Any) -> None:
    if vars(kind).get(name) is not value:
        setattr(kind, name, value)

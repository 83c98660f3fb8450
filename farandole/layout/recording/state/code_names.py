"""Which names the code of a module mentions: what it does not mention, it cannot read."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def own_classes(kind: type) -> list[type]:
    """A class and those that it is made of, without torch's."""
    return [
        each
        for each in kind.__mro__
        if each.__module__.split(".")[0] != "torch" and each is not object
    ]


def function_behind(value: Any) -> FunctionType | None:
    """The code behind a method or property."""
    function = getattr(value, "__func__", value)
    function = getattr(function, "fget", function)
    return function if isinstance(function, FunctionType) else None


def mentioned_names(kind: type) -> set[str]:
    """The names, of whatever, in a module's forward and in the methods that it mentions."""
    mentioned, waiting = {"forward"}, ["forward"]
    while waiting:
        name = waiting.pop()
        for each in own_classes(kind):
            function = function_behind(vars(each).get(name))
            if function is None:
                continue
            code = function.__code__
            texts = (text for text in code.co_consts if isinstance(text, str))  # getattr(self, …)
            # Too many names are harmless: a value that is compared without need can only cause a
            # refusal, and a name that is missed would hide a change.
            for found in {*code.co_names, *texts} - mentioned:
                mentioned.add(found)
                waiting.append(found)
    return mentioned

"""One choice that a script leaves open: its bounds or options, and what it is if nobody decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.errors import UserError

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Choice:
    """Either `low` and `high`, both inclusive, or `options`. Integers where both bounds are."""

    name: str
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: float | None = None
    options: tuple[Value, ...] = ()
    default: Value = None
    has_default: bool = False
    structure: bool = False

    @classmethod
    def make(
        cls,
        name: str,
        space: Any,
        high: Any,
        **settings: Any,
    ) -> Choice:
        """From the arguments of `run.choose`: `space` is the lower bound, or the options.

        Raises `UserError` for what is no choice.
        """
        _check_name(name)
        if isinstance(space, str) or not isinstance(space, (int, float, Sequence)):
            raise UserError(
                f'run.choose("{name}", {space!r}): give two bounds, such as 1e-4, 1e-1, or a list '
                "of options."
            )
        if isinstance(space, Sequence):
            made = cls(name, options=tuple(space), **settings)
            made._check_options(high)
        else:
            made = cls(name, space, high, **settings)
            made._check_bounds()
        if made.has_default:
            made.check(made.default)
        return made

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def space(self) -> dict[str, Any]:
        """What a study compares: all that says which values there are."""
        if self.options:
            return {"options": list(self.options)}
        return {
            "low": self.low,
            "high": self.high,
            **({"log": True} if self.log else {}),
            **({"step": self.step} if self.step is not None else {}),
        }

    def __str__(self) -> str:
        return space_text(self.space)

    def value(self) -> Value:
        """If nobody decides."""
        if self.has_default:
            return self.default
        if self.options:
            return self.options[0]
        assert self.low is not None
        assert self.high is not None
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        if self.step is not None:
            middle = self.low + round((middle - self.low) / self.step) * self.step
        return round(middle) if self.is_integer else float(middle)

    def which_default(self) -> str:
        """How `value` comes about."""
        if self.has_default:
            return "its default"
        if self.options:
            return "the first of its options"
        return f"the {'geometric' if self.log else 'arithmetic'} middle of {self}"

    def check(self, value: Value) -> Value:
        """Raises `UserError` for a value that is not in its bounds or among its options."""
        if self.options:
            if any(value == each and type(value) is type(each) for each in self.options):
                return value
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            assert self.low is not None
            assert self.high is not None
            whole = not self.is_integer or isinstance(value, int)
            if whole and self.low <= value <= self.high:
                return value if self.is_integer else float(value)
        raise UserError(f'run.choose("{self.name}"): {value!r} is not one of {self}.')

    def read(self, text: str) -> Value:
        """A value as the command line gives it. Raises `UserError`."""
        if self.options:
            for option in self.options:
                if str(option) == text:
                    return option
            raise UserError(f"--choose {self.name}={text}: give one of {self}.")
        try:
            return self.check(int(text) if self.is_integer else float(text))
        except ValueError:  # a UserError too
            raise UserError(f"--choose {self.name}={text}: give one of {self}.") from None

    def _check_options(self, high: float | None) -> None:
        if high is not None or self.log or self.step is not None:
            raise UserError(
                f'run.choose("{self.name}", {list(self.options)}): a list of options has no upper '
                "bound, log= or step=."
            )
        kinds = (bool, int, float, str, type(None))
        if not self.options or not all(isinstance(each, kinds) for each in self.options):
            raise UserError(
                f'run.choose("{self.name}", {list(self.options)}): give at least one option, each '
                "a number, a text, True, False or None."
            )
        texts = [str(each) for each in self.options]
        if len(set(texts)) < len(texts):
            raise UserError(
                f'run.choose("{self.name}", {list(self.options)}): options must be told apart by '
                "how they are written."
            )

    def _check_bounds(self) -> None:
        low, high = self.low, self.high
        said = f'run.choose("{self.name}", {low!r}, {high!r})'
        bounds = [low, high]
        if not all(isinstance(b, (int, float)) and not isinstance(b, bool) for b in bounds):
            raise UserError(f"{said}: give two bounds, such as 1e-4, 1e-1, or a list of options.")
        assert low is not None
        assert high is not None
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(f"{said}: the first bound must be below the second, both finite.")
        if self.log and low <= 0:
            raise UserError(f"{said}: log=True needs bounds above 0.")
        if self.step is None:
            return
        steps = (high - low) / self.step if self.step > 0 else math.nan
        whole_step = not self.is_integer or isinstance(self.step, int)
        if self.log or not whole_step or not abs(steps - round(steps)) < 1e-9:
            raise UserError(
                f"{said}: step={self.step} must lead from one bound to the other, and does not go "
                "with log=True."
            )


def space_text(space: Mapping[str, Any]) -> str:
    """`0.0001 to 0.1 (log)`, or the options."""
    if "options" in space:
        return ", ".join(map(str, space["options"]))
    steps = f" (step {space['step']:g})" if space.get("step") is not None else ""
    return f"{space['low']:g} to {space['high']:g}{' (log)' if space.get('log') else steps}"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or any(c.isspace() or c in "=,;" for c in name):
        raise UserError(
            f"run.choose({name!r}, …): give a name without spaces, =, comma and semicolon."
        )

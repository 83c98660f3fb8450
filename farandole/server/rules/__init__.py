"""What a server does with what is pushed: the rules, their text form, and questions."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from farandole.errors import UserError
from farandole.options import parse_options
from farandole.server.rules.adagrad import Adagrad
from farandole.server.rules.adam import Adam, AdamW
from farandole.server.rules.add import Add
from farandole.server.rules.allowed import find
from farandole.server.rules.pieces import pieces
from farandole.server.rules.proximal import Proximal
from farandole.server.rules.questions import QUESTIONS, Question, parse_question
from farandole.server.rules.rule import Rule
from farandole.server.rules.sgd import Sgd
from farandole.server.rules.translate import rule_of
from farandole.server.rules.vectors import Vectors

RULES: MappingProxyType[str, type[Rule]] = MappingProxyType(
    {kind.name: kind for kind in (Add, Sgd, Adagrad, Adam, AdamW, Proximal, Vectors)}
)

__all__ = [
    "QUESTIONS",
    "RULES",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "Proximal",
    "Question",
    "Rule",
    "Sgd",
    "Vectors",
    "parse_question",
    "parse_rule",
    "pieces",
    "rule_of",
]


def parse_rule(text: str, allowed: Sequence[str] = ()) -> Rule:
    """The rule that `name` or `name:key=value,…` describes.

    A rule of a user's own is written `package.module.ClassName:key=value,…`, and its module must be
    in `allowed`: the names of our rules have no dot, so that nothing can be read in two ways.

    Raises `UserError` with the nearest name for an unknown rule or key.
    """
    name, _, options = text.strip().partition(":")
    name = name.strip()
    kind = RULES.get(name) or find(name, allowed, what="rule", known=RULES)
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise UserError(
            f"the rule {name!r} is not a class that extends farandole.server.rules.Rule."
        )
    if kind.name != name:
        raise UserError(
            f"the rule {name!r} calls itself {kind.name!r}, which nobody could find. Remove `name` "
            "from the class."
        )
    return parse_options(kind, options, what=f"rule {name!r}")

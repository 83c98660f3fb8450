"""Rules do what torch's optimizers do, row by row; their text says the same; strangers stay out."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server.rules import (
    QUESTIONS,
    RULES,
    Adagrad,
    Adam,
    AdamW,
    Add,
    Proximal,
    Rule,
    Sgd,
    parse_question,
    parse_rule,
    rule_of,
)

STEPS = 10
ROWS, WIDTH = 7, 3
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

shares = st.floats(0, 1, exclude_max=True)
decays = st.sampled_from([0.0, 1e-4, 0.3])
epsilons = st.floats(1e-10, 1e-2)
sgds = st.one_of(
    st.builds(Sgd, weight_decay=decays, maximize=st.booleans()),
    st.builds(Sgd, momentum=shares, dampening=shares, weight_decay=decays, maximize=st.booleans()),
    st.builds(Sgd, momentum=st.floats(0.1, 0.99), nesterov=st.just(True), weight_decay=decays),
)
adagrads = st.builds(
    Adagrad,
    eps=epsilons,
    initial_sum=st.floats(0, 2),
    weight_decay=decays,
    rate_decay=st.floats(0, 1),
    maximize=st.booleans(),
)
adams = st.sampled_from([Adam, AdamW]).flatmap(
    lambda kind: st.builds(
        kind,
        beta1=shares,
        beta2=st.floats(0, 0.9999),
        eps=epsilons,
        weight_decay=decays,
        amsgrad=st.booleans(),
        maximize=st.booleans(),
    )
)
proximals = st.builds(Proximal, l1=st.floats(0, 1), l2=st.floats(0, 1), adaptive=st.booleans())
rules = st.one_of(st.builds(Add), sgds, adagrads, adams, proximals)


@dataclasses.dataclass
class Table:
    """Weights with a rule's state, as a server keeps them."""

    rule: Rule
    weight: torch.Tensor
    state: list[torch.Tensor]

    @classmethod
    def of(cls, rule: Rule, weight: torch.Tensor) -> Table:
        state = [torch.full_like(weight, rule.initial(slot)) for slot in rule.slots]
        return cls(rule, weight.clone(), state)

    def push(self, gradient: torch.Tensor, rate: float, step: int) -> None:
        self.rule.update(self.weight, gradient, self.state, rate, step)

    def push_rows(self, rows: torch.Tensor, values: torch.Tensor, rate: float, step: int) -> None:
        weight, *state = [tensor[rows] for tensor in (self.weight, *self.state)]
        self.rule.update(weight, values, state, rate, step)
        for whole, part in zip((self.weight, *self.state), (weight, *state), strict=True):
            whole[rows] = part

    def equals(self, other: Table) -> bool:
        mine, theirs = (self.weight, *self.state), (other.weight, *other.state)
        return all(map(torch.equal, mine, theirs))


def optimizer_of(rule: Rule, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Written down here once more, by hand: `rule_of` is what is tested."""
    if isinstance(rule, Sgd):
        return torch.optim.SGD(
            [weight],
            momentum=rule.momentum,
            dampening=rule.dampening,
            weight_decay=rule.weight_decay,
            nesterov=rule.nesterov,
            maximize=rule.maximize,
        )
    if isinstance(rule, Adagrad):
        return torch.optim.Adagrad(
            [weight],
            lr_decay=rule.rate_decay,
            weight_decay=rule.weight_decay,
            initial_accumulator_value=rule.initial_sum,
            eps=rule.eps,
            maximize=rule.maximize,
        )
    assert isinstance(rule, Adam)
    kind = torch.optim.AdamW if isinstance(rule, AdamW) else torch.optim.Adam
    return kind(
        [weight],
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        amsgrad=rule.amsgrad,
        maximize=rule.maximize,
    )


def random_matrices(seed: int, count: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(count)
    ]


# ------------------------------------------------------------------ the same as torch's optimizers


@given(
    rule=st.one_of(sgds, adagrads, adams),
    seed=st.integers(0, 2**32),
    rates=st.lists(st.floats(1e-4, 0.5), min_size=STEPS, max_size=STEPS),
    parts=st.integers(1, ROWS),
)
def test_the_updates_are_torchs(rule: Rule, seed: int, rates: list[float], parts: int) -> None:
    start, *gradients = random_matrices(seed, STEPS + 1)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of(rule, parameter)
    (group,) = optimizer.param_groups
    text = rule_of(group, optimizer)
    assert parse_rule(text) == rule
    whole, by_rows = Table.of(parse_rule(text), start), Table.of(parse_rule(text), start)
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        group["lr"] = rate
        parameter.grad = gradient.clone()
        optimizer.step()
        whole.push(gradient, rate, step)
        for rows in shuffled.tensor_split(parts):
            by_rows.push_rows(rows, gradient[rows], rate, step)
        for table in (whole, by_rows):
            torch.testing.assert_close(table.weight, parameter.detach(), rtol=1e-12, atol=1e-12)
    if isinstance(rule, Sgd):
        assert torch.equal(whole.weight, parameter.detach()), "to the bit"


@pytest.mark.parametrize("make", [Sgd, Adagrad, Adam, AdamW])
def test_defaults_are_torchs(make: type[Rule]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    kind = {Sgd: "SGD"}.get(make, make.__name__)
    optimizer = getattr(torch.optim, kind)([parameter])
    assert parse_rule(rule_of(optimizer.param_groups[0], optimizer)) == make()


def test_each_group_has_its_rule() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": [second]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-4)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # notes its initial rate in the groups
    texts = [rule_of(group, optimizer) for group in optimizer.param_groups]
    assert texts == ["sgd:momentum=0.9", "sgd:momentum=0.9,weight_decay=0.0001"]


def test_betas_may_be_tensors() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], foreach=False)
    group = {**optimizer.param_groups[0], "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    assert rule_of(group, optimizer) == "adam:beta1=0.5,beta2=0.75"


class Twice(torch.optim.SGD):
    """Whose steps nobody knows."""


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.SparseAdam, Twice])
def test_an_optimizer_without_a_rule(kind: type[Any]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(
        UserError, match=rf"{kind.__name__}.*Adagrad, Adam, AdamW, SGD.*update=worker"
    ):
        rule_of(optimizer.param_groups[0], optimizer)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"differentiable": True}, "nothing like differentiable=True of torch.optim.SGD"),
        ({"max_momentum": 0.95}, "nothing like max_momentum=0.95"),  # which a scheduler changes
        ({"trust": 3}, "nothing like trust=3.*update=worker"),
    ],
)
def test_an_option_without_a_rule(more: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UserError, match=message):
        rule_of({**optimizer.param_groups[0], **more}, optimizer)


# ------------------------------------------------------------------ what all rules have in common


@given(
    rule=rules,
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    cut=st.integers(0, ROWS),
    rate=st.floats(1e-4, 1),
)
def test_same_inputs_same_bits(
    rule: Rule, seed: int, dtype: torch.dtype, cut: int, rate: float
) -> None:
    start, *gradients = random_matrices(seed, 4, dtype)
    first, second = Table.of(rule, start), Table.of(rule, start)
    for step, gradient in enumerate(gradients, start=1):
        for rows in (torch.arange(cut), torch.arange(cut, ROWS)):  # one of them may be empty
            pushed = gradient[rows]
            first.push_rows(rows, pushed, rate, step)
            assert torch.equal(pushed, gradient[rows]), "somebody else may still read it"
            second.push_rows(rows, pushed, rate, step)
    assert first.equals(second)


@given(rule=rules, seed=st.integers(0, 2**32), row=st.integers(0, ROWS - 1))
def test_a_row_is_updated_as_if_alone(rule: Rule, seed: int, row: int) -> None:
    start, *gradients = random_matrices(seed, 4)
    together, alone = Table.of(rule, start), Table.of(rule, start[row : row + 1])
    for step, gradient in enumerate(gradients, start=1):
        together.push(gradient, 0.1, step)
        alone.push(gradient[row : row + 1], 0.1, step)
    for ours, its in zip(
        (together.weight, *together.state), (alone.weight, *alone.state), strict=True
    ):
        torch.testing.assert_close(ours[row : row + 1], its, rtol=1e-12, atol=1e-12)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "text",
    [
        "add",
        "sgd:momentum=0.9,nesterov,weight_decay=0.1",
        "adagrad:weight_decay=0.1",
        "adam:amsgrad,weight_decay=0.1",
        "adamw",
        "proximal:l1=0.1,l2=0.1",
        "proximal:l1=0.1,l2=0.1,adaptive",
    ],
)
def test_bits_do_not_depend_on_the_number_of_cores(text: str, dtype: torch.dtype) -> None:
    """Replicas need not be alike. Torch's threads leave rests at other places of a long tensor."""
    rule = parse_rule(text)
    found = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        generator = torch.Generator().manual_seed(1)
        table = Table.of(rule, torch.randn(100_003, 1, generator=generator).to(dtype))
        for step in range(1, 4):
            gradient = torch.randn(table.weight.shape, generator=generator).to(dtype)
            table.push(gradient, 0.1, step)
        found.append(table)
    for other in found[1:]:
        assert found[0].equals(other)


@given(rules)
def test_text_and_back(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule
    assert parse_rule(f" {rule} ") == rule


@pytest.mark.parametrize("kind", RULES.values())
def test_rules_are_frozen_and_known_by_name(kind: type[Rule]) -> None:
    rule = kind()
    assert parse_rule(kind.name) == rule
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sdg", "there is no rule 'sdg'. Did you mean 'sgd'?"),
        ("", "there is no rule ''. Known: adagrad, adam, adamw, add, proximal, sgd, vectors."),
        ("sgd:momentun=0.9", "rule 'sgd' has no option 'momentun'. Did you mean 'momentum'?"),
        ("sgd:momentum=-1", "sgd: momentum=-1 must be a number of at least 0"),
        ("sgd:momentum=inf", "sgd: momentum=inf must be a number of at least 0"),
        ("sgd:dampening=inf", "sgd: dampening=inf must be a number"),
        ("sgd:nesterov", "nesterov needs a momentum and no dampening; momentum=0"),
        ("sgd:momentum=0.9,nesterov,dampening=0.5", "momentum=0.9 and dampening=0.5"),
        ("sgd:weight_decay=few", "weight_decay='few' is not a number"),
        ("adagrad:eps=-1", "adagrad: eps=-1 must be a number of at least 0"),
        ("adagrad:initial_sum=-1", "adagrad: initial_sum=-1 must be"),
        ("adagrad:rate_decay=-1", "adagrad: rate_decay=-1 must be"),
        ("adam:beta1=1", "adam: beta1=1 must be 0 or more, and below 1"),
        ("adamw:beta2=-0.1", "adamw: beta2=-0.1 must be 0 or more"),
        ("adamw:weight_decay=-1", "adamw: weight_decay=-1 must be"),
        ("proximal:l1=-1", "proximal: l1=-1 must be"),
        ("proximal:l2=-1", "proximal: l2=-1 must be"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_rule(text)
    assert message in str(error.value)


def test_an_option_that_is_no_number() -> None:
    with pytest.raises(UserError, match="l1=nan"):
        Proximal(l1=math.nan)


# ------------------------------------------------------------------ rules that torch does not have


def test_add_adds_as_much_as_the_rate_says() -> None:
    table = Table.of(Add(), torch.tensor([[1.0, 2.0]]))
    table.push(torch.tensor([[4.0, -4.0]]), 0.5, 1)
    assert table.weight.tolist() == [[3.0, 0.0]]


def test_add_counts_whole_numbers_exactly() -> None:
    large = 2**60 + 1  # more than a float64 holds
    table = Table.of(Add(), torch.tensor([[large, 5]]))
    table.push(torch.tensor([[1, -2]]), 2.0, 1)
    assert table.weight.tolist() == [[large + 2, 1]]
    table.push(torch.tensor([[0, 3]]), 0.5, 2)
    assert table.weight.tolist() == [[large + 2, 3]], "1.5 is rounded to 2"


def test_only_add_takes_whole_numbers() -> None:
    assert {name for name, kind in RULES.items() if kind.takes_integers} == {"add"}


@given(
    rule=proximals,
    seed=st.integers(0, 2**32),
    rates=st.lists(st.floats(1e-3, 1), min_size=3, max_size=3),
)
def test_proximal_against_the_formula(rule: Proximal, seed: int, rates: list[float]) -> None:
    start, *gradients = random_matrices(seed, 4)
    table = Table.of(rule, start)
    expected, squares = start.clone(), torch.zeros_like(start)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        table.push(gradient, rate, step)
        squares += gradient**2
        each = rate / (1 + squares.sqrt()) if rule.adaptive else torch.full_like(start, rate)
        moved = expected - each * gradient
        expected = moved.sign() * (moved.abs() - each * rule.l1).relu() / (1 + each * rule.l2)
        torch.testing.assert_close(table.weight, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_proximal_solves_the_lasso(adaptive: bool) -> None:
    """At the solution the penalty and the gradient balance: |g| ≤ l1 where w is exactly 0."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    truth = torch.tensor([3.0, -2, 0, 0, 0, 0, 0, 1]).double().view(-1, 1)
    targets = inputs @ truth
    l1 = 0.5
    table = Table.of(Proximal(l1=l1, adaptive=adaptive), torch.zeros_like(truth))
    for step in range(1, 3001):
        gradient = inputs.T @ (inputs @ table.weight - targets) / len(inputs)
        table.push(gradient, 5.0 if adaptive else 0.3, step)
    gradient = inputs.T @ (inputs @ table.weight - targets) / len(inputs)
    zero = table.weight == 0
    assert zero.sum() == 5
    assert torch.equal(zero, truth == 0)
    assert bool((gradient[zero].abs() <= l1).all())
    torch.testing.assert_close(gradient[~zero], -l1 * table.weight[~zero].sign())


# ------------------------------------------------------------------ what users write themselves

MODULE = '''
from collections import OrderedDict
from dataclasses import dataclass
from os import getcwd

import torch

from farandole.server.rules import Rule, Sgd


@dataclass(frozen=True)
class Clipped(Rule):
    most: float = 1.0

    def update(self, weight, gradient, state, rate, step):
        weight.add_(gradient.clamp(-self.most, self.most), alpha=-rate)


class Renamed(Sgd):
    """A class of ours, under another name."""


class SaysItIsSgd(Sgd):
    name = "sgd"


class NoRule:
    pass


def column_sums(values):
    return values.sum(dim=0)


def mean(values):
    return values.mean()


answer = 42
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rules_of_mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_rule_of_ones_own(mine: str) -> None:
    rule = parse_rule(f"{mine}.Clipped:most=0.5", allowed=("other", mine))
    assert str(rule) == f"{mine}.Clipped:most=0.5"
    assert parse_rule(str(rule), allowed=(mine,)) == rule
    table = Table.of(rule, torch.tensor([[1.0, 1.0]]))
    table.push(torch.tensor([[9.0, 0.25]]), 1.0, 1)
    assert table.weight.tolist() == [[0.5, 0.75]]


def test_a_rule_that_extends_one_of_ours_keeps_its_own_name(mine: str) -> None:
    rule = parse_rule(f"{mine}.Renamed:momentum=0.9", allowed=(mine,))
    assert str(rule) == f"{mine}.Renamed:momentum=0.9"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}.Clipped:least=1", "has no option 'least'. Known: most."),
        ("{}.Clip", "defines no 'Clip'"),
        ("{}.Sgd", "defines no 'Sgd'. Write the module in which it is defined"),
        ("{}.OrderedDict", "defines no 'OrderedDict'"),
        ("{}.NoRule", "is not a class that extends farandole.server.rules.Rule"),
        ("{}.column_sums", "is not a class that extends"),
        ("{}.SaysItIsSgd", "calls itself 'sgd', which nobody could find"),
        ("os.getcwd", "'os', which the servers may not import. Allowed: {}. Start them with "),
        ("{}.deeper.Rule", "--functions {}.deeper, or Cluster(functions=['{}.deeper'])"),
    ],
)
def test_rules_of_ones_own_that_cannot_be(mine: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_rule(text.replace("{}", mine), allowed=(mine,))
    assert message.replace("{}", mine) in str(error.value)


def test_nothing_is_imported_that_is_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap_for_rules.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for parse in (parse_rule, parse_question):
        with pytest.raises(UserError, match=r"may not import\. Allowed: none"):
            parse("trap_for_rules.Thing")
        with pytest.raises(SystemError, match="imported"):  # so the trap does work
            parse("trap_for_rules.Thing", allowed=("trap_for_rules",))


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UserError, match="'nowhere_at_all' cannot be imported: No module named"):
        parse_rule("nowhere_at_all.Rule", allowed=("nowhere_at_all",))


# ------------------------------------------------------------------ questions


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("name", "answer"),
    [("sum", -1), ("square_sum", 29), ("abs_sum", 9), ("nonzeros", 3), ("count", 6)],
)
def test_questions(name: str, answer: int, dtype: torch.dtype) -> None:
    values = torch.tensor([[4, -2], [0, 0], [-3, 0]], dtype=dtype)
    found = parse_question(name)(values)
    assert found.shape == (1,)
    assert found.item() == answer


@given(
    name=st.sampled_from(sorted(QUESTIONS)),
    numbers=st.lists(st.integers(-100, 100), min_size=2, max_size=20),
    cut=st.integers(0, 20),
)
def test_answers_of_parts_add_up(name: str, numbers: list[int], cut: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32).view(-1, 1)
    before = copy.deepcopy(values)
    question = parse_question(name)
    parts = question(values[:cut]) + question(values[cut:])
    assert torch.equal(parts, question(values))
    assert torch.equal(values, before)


def test_sums_do_not_lose_what_is_small() -> None:
    values = torch.full((3, 1), 1.0)
    values[0] = 2.0**25  # to which a float32 adds 1 in vain
    assert parse_question("sum")(values).item() == 2**25 + 2


def test_a_question_of_ones_own(mine: str) -> None:
    question = parse_question(f"{mine}.column_sums", allowed=(mine,))
    assert question(torch.ones(4, 2)).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("som", "there is no question 'som'. Did you mean 'sum'? One of your own is written with"),
        ("{}.NoRule", "is not a function"),
        ("{}.answer", "defines no 'answer'"),
        ("{}.getcwd", "defines no 'getcwd'"),
        ("shutil.rmtree", "'shutil', which the servers may not import"),
    ],
)
def test_questions_that_cannot_be(mine: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_question(text.replace("{}", mine), allowed=(mine,))
    assert message in str(error.value)


def test_an_answer_that_is_no_vector(mine: str) -> None:
    with pytest.raises(UserError, match=r"must answer with a tensor of one dimension.*\(\)"):
        parse_question(f"{mine}.mean", allowed=(mine,))(torch.ones(2, 2))

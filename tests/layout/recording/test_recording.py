"""A model is recorded while it runs on a sample; what was recorded is the model, or is refused."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farandole import UserError
from farandole.layout.arguments import arguments_of, call
from farandole.layout.partition.blocks import Block, Sample, blocks_of
from tests.layout.gpt import GPT, WORDS

SHAPES = [(3, 5, 4), (2, 5, 4), (1, 7, 4)]  # of the sample, and of other batches


def in_order(blocks: Sequence[Block], inputs: Any) -> Any:
    value: Any = arguments_of(inputs)
    for block in blocks:
        value = call(block.module, value)
    return value


def outcome(model: nn.Module, run: Callable[[Any], Tensor], inputs: Any) -> list[Tensor]:
    """Output and gradients, from the same random numbers."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model.zero_grad()
    output = run(inputs)
    output.square().sum().backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [output.detach(), *grads]


def assert_same(twin: nn.Module, model: nn.Module, blocks: Sequence[Block], inputs: Any) -> None:
    """In both modes the blocks of `model` give what its copy gives."""
    for mode in (True, False):
        twin.load_state_dict(model.state_dict())
        twin.train(mode)
        for block in blocks:
            block.module.train(mode)
        expected = outcome(twin, lambda given: call(twin, arguments_of(given)), inputs)
        found = outcome(model, lambda given: in_order(blocks, given), inputs)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


class Made(nn.Module):
    """A layer, and a forward to be told; `state` are buffers and other attributes."""

    def __init__(self, forward: Callable[..., Tensor], state: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.told = forward
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value.clone())
            else:
                setattr(self, name, copy.copy(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self, x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


def sizes(self: Made, x: Tensor) -> Tensor:
    b, t, c = x.size()
    assert t <= 16, f"too long: {t}"
    assert c == 4
    seen = torch.ones(t, t, dtype=torch.bool).tril()[:t, :t]
    scores = x @ x.mT * x.shape[-1] ** -0.5 / math.sqrt(c)
    y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ x
    places = torch.arange(t, device=x.device)[None, :, None] / t
    half = y[:, : t // 2].sum() * max(t, 3) / x.numel()
    return self.layer(y.reshape(b * t, -1).view(b, t, c)) + places + half + x.new_zeros(x.shape)


def in_place(self: Made, x: Tensor) -> Tensor:
    y = self.layer(x)
    y += x
    y[:, 0] = 0.5
    y.view(y.shape[0], -1).mul_(2)
    return y.masked_fill_(y > 1, 0.5)


def parts(self: Made, x: Tensor) -> Tensor:
    left, right = self.layer(x).split(2, dim=-1)
    best, where = x.max(-1)
    chosen = x[x > 0]
    return torch.cat([right, left], -1) * best[..., None] + where[..., None] + chosen.sum()


def by_mode(self: Made, x: Tensor) -> Tensor:
    return F.dropout(self.layer(x), 0.5 if self.training else 0.1, training=self.training)


def counts(self: Made, x: Tensor) -> Tensor:
    self.steps += 1
    return self.layer(x) * self.steps


def draws(self: Made, x: Tensor) -> Tensor:
    return self.layer(x) + torch.rand(x.shape[1], 1) + torch.randn_like(x)


def again(self: Made, x: Tensor) -> Any:
    return checkpoint(self.layer, x, use_reentrant=False)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


rounded = Rounded.apply  # bound before anybody looks


def rounds(self: Made, x: Tensor) -> Tensor:
    return self.layer(rounded(self.layer(x)))


RECORDED: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "sizes": (sizes, {}),
    "in place": (in_place, {}),
    "parts": (parts, {}),
    "by mode": (by_mode, {}),
    "counts": (counts, {"steps": torch.zeros(())}),
    "draws": (draws, {}),
    "checkpoint": (again, {}),
    "function": (rounds, {}),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_forward_may_do(name: str) -> None:
    model = Around(Made(*RECORDED[name]))
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    blocks = blocks_of(model, sample=Sample(arguments_of(torch.randn(SHAPES[0]))))
    why = [reason for block in blocks for reason in block.module.meta["whole"].values()]
    if name == "checkpoint" and torch.__version__.startswith("2.11."):
        # Where there is no GPU, its checkpoint enters autocast by itself: the submodule stays
        # whole, and is as exact.
        assert all("autocast" in reason for reason in why)
    else:
        assert why == []
    assert blocks[-1].name == "after"
    torch.set_rng_state(state)
    for shape in SHAPES:
        assert_same(twin, model, blocks, torch.randn(shape))


def without_gradient(self: Made, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean(-1, keepdim=True)
    return self.layer(x) - mean


def by_value(self: Made, x: Tensor) -> Tensor:
    return self.layer(x) if x.sum() > 0 else x


def remembers(self: Made, x: Tensor) -> Tensor:
    self.last = x.detach()
    return self.layer(x)


def collects(self: Made, x: Tensor) -> Tensor:
    self.shapes.append(1)
    return self.layer(x)


def lowers(self: Made, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layer(x).float()


def throws_dice(self: Made, x: Tensor) -> Tensor:
    return self.layer(x) if random.random() < 0.5 else x


def throws_dice_of_numpy(self: Made, x: Tensor) -> Tensor:
    return self.layer(x) * float(np.random.rand())


def something_else(self: Made, x: Tensor) -> Tensor:
    y = self.layer(x)
    return F.relu(y) * 2 if self.training else y


WHOLE: dict[str, tuple[Callable[..., Tensor], dict[str, Any], str]] = {
    "no_grad": (without_gradient, {}, "whether gradients are computed"),
    "values": (by_value, {}, "depends on the values of a tensor"),
    "item": (lambda self, x: self.layer(x) * x.mean().item(), {}, "values of a tensor .item"),
    "attribute": (remembers, {}, "changes self.last"),
    "list": (collects, {"shapes": []}, r"changes len\(self.shapes\)"),
    "autocast": (lowers, {}, "changes autocast"),
    "random": (throws_dice, {}, "random numbers of Python"),
    "numpy": (throws_dice_of_numpy, {}, "random numbers of Python or NumPy"),
    "mode": (something_else, {}, "something else in evaluation"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_submodule_that_cannot_be_recorded_stays_whole(name: str) -> None:
    forward, state, why = WHOLE[name]
    model = Around(Made(forward, state))
    twin = copy.deepcopy(model)
    blocks = blocks_of(model, sample=Sample(arguments_of(torch.randn(SHAPES[0]))))
    assert [block.name for block in blocks] == ["before", "inner", "after"]
    ((whole, said),) = blocks[1].module.meta["whole"].items()
    assert whole == "inner"
    assert re.search(why, said), said
    for shape in SHAPES:
        assert_same(twin, model, blocks, torch.randn(shape))


def test_compiled_submodules_stay_so_and_a_compiled_model_is_refused() -> None:
    model = Around(Made(sizes, {}))
    ran: list[int] = []

    def compiled(x: Tensor) -> Tensor:  # in place of what model.inner.compile() makes
        ran.append(1)
        return model.inner._call_impl(x)

    model.inner._compiled_call_impl = compiled
    sample = Sample(arguments_of(torch.randn(SHAPES[0])))
    blocks = blocks_of(model, sample=sample)
    assert model.inner._compiled_call_impl is compiled
    ran.clear()
    x = torch.randn(SHAPES[1])
    found = in_order(blocks, x)
    assert ran == [1]
    assert torch.equal(found, model(x))
    with pytest.raises(UserError, match=r"what torch.compile returned"):
        blocks_of(torch.compile(model, backend="eager"), sample=sample)


def test_hooks_of_the_backward_pass_keep_a_module_whole() -> None:
    model = Around(Made(sizes, {}))
    seen: list[int] = []
    model.inner.register_full_backward_hook(lambda *_: seen.append(1))
    blocks = blocks_of(model, sample=Sample(arguments_of(torch.randn(SHAPES[0]))))
    assert "it has hooks" in blocks[1].module.meta["whole"]["inner"]
    in_order(blocks, torch.randn(SHAPES[1])).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_cannot_be_recorded(name: str) -> None:
    forward, state, why = WHOLE[name]
    with pytest.raises(UserError, match=f"Made cannot be cut into stages.*{why}"):
        blocks_of(Made(forward, state), sample=Sample(arguments_of(torch.randn(SHAPES[0]))))


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda self, x: sum(self.layer(x[:, i]) for i in range(x.shape[1])), "found 5 .* finds 7"),
        (lambda self, x: sum(self.layer(row) for row in x.unbind(1)), "found 5 .* finds 7"),
        (lambda self, x: self.layer(x) if x.shape[1] < 6 else x, "found True .* finds False"),
        (lambda self, x: self.layer(x) * len(x), r"len\(x\), where x.shape\[0\] may do.* finds 1"),
        (lambda self, x: self.layer(x) * float(x.size(1)), "found 5 .* finds 7"),
    ],
)
def test_another_shape_is_refused_where_the_code_has_looked_at_it(
    forward: Callable[..., Tensor], why: str
) -> None:
    model = Around(Made(forward, {}))
    twin = copy.deepcopy(model)
    blocks = blocks_of(model, sample=Sample(arguments_of(torch.randn(SHAPES[0]))))
    assert_same(twin, model, blocks, torch.randn(SHAPES[0]))
    with pytest.raises(UserError, match=f"test_recording.py, line .*{why}"):
        in_order(blocks, torch.randn(SHAPES[2]))


def test_arguments_unlike_the_sample_s_are_refused() -> None:
    model = GPT()
    words = torch.randint(WORDS, (2, 6))
    blocks = blocks_of(model, sample=Sample(arguments_of((words, words))))
    with pytest.raises(UserError, match=r"cut for the arguments 0, 1, .* is given 0. Give"):
        in_order(blocks, words)
    with pytest.raises(UserError, match=r"1 is a tensor of int64 with 2 axes, .* float32 with 2"):
        in_order(blocks, (words, words.float()))
    with pytest.raises(UserError, match=r"found True .* finds False"):  # its own assertion
        in_order(blocks, (torch.zeros(2, 17, dtype=torch.long),) * 2)
    with pytest.raises(UserError, match=r"GPT fails on sample=….*longest is 16"):
        blocks_of(model, sample=Sample(arguments_of(torch.zeros(2, 17, dtype=torch.long))))


def test_a_gpt_is_cut_at_its_layers() -> None:
    model = GPT(dropout=0.4)
    words = torch.randint(WORDS, (3, 6))
    twin = copy.deepcopy(model)
    blocks = blocks_of(model, sample=Sample(arguments_of({"idx": words, "targets": words})))
    names = [block.name for block in blocks]
    assert {f"layers.{number}.before" for number in range(4)} < set(names)
    assert names[-1] == "head"
    tensors = model.state_dict(keep_vars=True)
    for block in blocks:
        for name, tensor in block.module.state_dict(keep_vars=True).items():
            assert tensor is tensors[name]
    for shape in ((3, 6), (1, 9)):
        words = torch.randint(WORDS, shape)
        batch = {"targets": words, "idx": words.flip(1)}  # in any order
        for mode in (True, False):
            twin.train(mode)
            for block in blocks:
                block.module.train(mode)
            expected = outcome(twin, lambda given: twin(**given)[1], batch)
            found = outcome(model, lambda given: in_order(blocks, given)[1], batch)
            assert all(map(torch.equal, found, expected))


def test_an_encoder_of_torch_is_cut_at_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = Around(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    twin = copy.deepcopy(model)
    blocks = blocks_of(model, sample=Sample(arguments_of(torch.randn(SHAPES[0]))))
    names = [block.name for block in blocks]
    assert names == ["before", *(f"inner.layers.{number}" for number in range(3)), "after"]
    for shape in SHAPES:
        assert_same(twin, model, blocks, torch.randn(shape))


def test_cuts_by_name_and_the_mode_of_the_model() -> None:
    model = GPT().eval()
    words = torch.randint(WORDS, (3, 6))
    sample = Sample(arguments_of((words, words)))
    blocks = blocks_of(model, ("layers.2", "head"), sample)
    assert [block.name for block in blocks] == ["words", "layers.2", "head"]
    assert not any(block.module.training for block in blocks)
    assert torch.equal(in_order(blocks, (words, words))[1], model(words, words)[1])


def test_precision_is_that_of_the_run() -> None:
    def forward(self: Made, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.ones(1, dtype=y.dtype)

    model = Around(Made(forward, {}))
    x = torch.randn(SHAPES[0])
    sample = Sample(arguments_of(x), precision=torch.bfloat16)
    blocks = blocks_of(model, sample=sample)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(in_order(blocks, x), model(x))


def test_numbers_among_the_inputs_may_change() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float, way: str = "up") -> Tensor:
            return self.layer(x) * scale if way == "up" else self.layer(x) / scale

    model, x = Scaled(), torch.randn(2, 4)
    blocks = blocks_of(model, sample=Sample(arguments_of({"x": x, "scale": 2.0, "way": "up"})))
    assert torch.equal(in_order(blocks, {"x": x, "scale": 5.0, "way": "up"}), model(x, 5.0))
    with pytest.raises(UserError, match=r"way is 'up', and here it is 'down'"):
        in_order(blocks, {"x": x, "scale": 5.0, "way": "down"})

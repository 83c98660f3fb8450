"""Forwards that nobody here would write: each is exact, or refused with the layer and the function.

Two steps in double precision, on tiles, on stages and on both, against the plain model. The
self-check is off: what it would find must be right, or refused, before it.
"""

from __future__ import annotations

import copy
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from farandole import FarandoleError
from farandole.layout import parse_layout
from farandole.testing import run_world
from farandole.train import Run
from tests.layout.models import sgd

pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = {
    "stages": "stages=2,microbatches=2",
    "tiles": "tiles=2x1",
    "both": "tiles=2x1,stages=2",
}
CHANNELS = 4
SIZE = 6


class Odd(nn.Module):
    """A layer or two, and `told`, which is its forward."""

    def __init__(self, told: Forward) -> None:
        super().__init__()
        self.told = told
        self.layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.scale = nn.Parameter(torch.full((CHANNELS, 1, 1), 0.7))
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.inner: nn.Module = nn.Identity()
        self.own_code = False

    def forward(self, x: Tensor) -> Tensor:
        if self.own_code and float(x.detach().sum()) == SIZE:  # so that it cannot be traced
            return x
        return self.told(self, x)


Forward = Callable[[Odd, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, told: Forward, prepare: Callable[[Odd], Any] | None) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, CHANNELS, 3, padding=1)
        self.odd = Odd(told)
        self.after = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.head = nn.Linear(CHANNELS * 4, 3)
        self.double()
        if prepare is not None:
            prepare(self.odd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.odd(self.before(x).tanh())).tanh()
        found: Tensor = self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return found


class Case(NamedTuple):
    forward: Forward
    tiles: str = ""  # why it is refused on tiles; nothing: it is exact
    stages: str = ""
    prepare: Callable[[Odd], Any] | None = None


class Marked(Tensor):
    """A subclass that does nothing."""


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-1e-3, 1e-3)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * 2 if bool(x.sum() > 0) else x.tanh()


def per_sample(self: Odd, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda each: each.tanh() * each.mean())(x)


def vmapped_weights(self: Odd, x: Tensor) -> Tensor:
    scaled = torch.func.vmap(lambda row: row / row.norm())(self.layer.weight.flatten(1))
    return F.conv2d(x, scaled.view_as(self.layer.weight), padding=1)


def gradient_of_function(self: Odd, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda each: each.tanh().sum())(x)


def jvp(self: Odd, x: Tensor) -> Tensor:
    return torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1]


def functional(self: Odd, x: Tensor) -> Tensor:
    weights = {name: 2 * each for name, each in self.layer.named_parameters()}
    found: Tensor = torch.func.functional_call(self.layer, weights, (x,))
    return found


def nested(self: Odd, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor(list(x.flatten(1).unbind()), layout=torch.strided)
    return torch.nested.to_padded_tensor(rows, 0.0).view(x.shape)


def sparse(self: Odd, x: Tensor) -> Tensor:
    flat = x.flatten(1)
    mixing = torch.eye(flat.shape[0], dtype=x.dtype).to_sparse()
    return torch.sparse.mm(mixing, flat).view(x.shape)


def to_sparse(self: Odd, x: Tensor) -> Tensor:
    return x.to_sparse().to_dense() * 2


def complex_numbers(self: Odd, x: Tensor) -> Tensor:
    return (
        torch.fft.ifft2(torch.fft.fft2(x) * 1j).imag
        + torch.view_as_real(torch.complex(x, x))[..., 0]
    )


def data(self: Odd, x: Tensor) -> Tensor:
    return x / (1 + x.data.abs().mean())


def written_data(self: Odd, x: Tensor) -> Tensor:
    x = x * 1
    x.data.clamp_(-0.5, 0.5)
    return x


def item(self: Odd, x: Tensor) -> Tensor:
    return x / (1 + x.detach().abs().max().item())


def floated(self: Odd, x: Tensor) -> Tensor:
    return x * 2 if float(x.detach().sum()) > 0 else x * 3


def as_numpy(self: Odd, x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.tanh(x.detach().numpy()))


def as_list(self: Odd, x: Tensor) -> Tensor:
    return x * max(x.detach().flatten().tolist())


def by_array(self: Odd, x: Tensor) -> Tensor:
    return x * float(np.asarray(x.detach()).mean())


def copied(self: Odd, x: Tensor) -> Tensor:
    return x + copy.deepcopy(x.detach()).tanh()


def shallow(self: Odd, x: Tensor) -> Tensor:
    return x + copy.copy(x)


def view_in_place(self: Odd, x: Tensor) -> Tensor:
    x = x * 1
    x[:, :2].mul_(2)
    return x


def set_item(self: Odd, x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0] = 0.5
    return x


def flat_in_place(self: Odd, x: Tensor) -> Tensor:
    x = x * 1
    x.view(-1).mul_(2)
    return x


def penalty(self: Odd, x: Tensor) -> Tensor:
    y = self.layer(x)
    if not y.requires_grad:
        return y
    (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + found


def penalty_of_weights(self: Odd, x: Tensor) -> Tensor:
    y = self.layer(x)
    if not y.requires_grad:
        return y
    (found,) = torch.autograd.grad(y.square().sum(), self.layer.weight, create_graph=True)
    return y + found.square().mean()


def weights_only_gradient(self: Odd, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return x
    (found,) = torch.autograd.grad(
        self.layer.weight.square().sum(), self.layer.weight, create_graph=True
    )
    return F.conv2d(x, found, padding=1)


def backward_inside(self: Odd, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.requires_grad:
        y.square().mean().backward(retain_graph=True)
    return y


def tensor_hook(self: Odd, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return y


def hook_on_scaled_weight(self: Odd, x: Tensor) -> Tensor:
    weight = self.layer.weight * 2
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return F.conv2d(x, weight, padding=1)


def retained(self: Odd, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.requires_grad:
        y.retain_grad()
    return y


def reentrant(self: Odd, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(self.layer, x, use_reentrant=True)
    return found


def not_reentrant(self: Odd, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)
    return found


def not_reentrant_weights(self: Odd, x: Tensor) -> Tensor:
    weight = checkpoint(lambda weight: weight.tanh() * 2, self.layer.weight, use_reentrant=False)
    return F.conv2d(x, weight, padding=1)


def called(self: Odd, x: Tensor) -> Tensor:
    found: Tensor = self.inner(self.layer(x))
    return found


def plain_layer(self: Odd, x: Tensor) -> Tensor:
    found: Tensor = self.layer(x)
    return found


def subclass(self: Odd, x: Tensor) -> Tensor:
    return x.as_subclass(Marked) * 2


def subclassed_weight(self: Odd, x: Tensor) -> Tensor:
    return F.conv2d(x, self.layer.weight.as_subclass(Marked), padding=1).as_subclass(Tensor)


def without_gradients(self: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.layer(x).abs().mean()
    return x / (1 + scale)


def detached(self: Odd, x: Tensor) -> Tensor:
    return x - x.mean((2, 3), keepdim=True).detach() + (self.layer(x) - x).detach()


def inference(self: Odd, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = self.layer(x).abs().mean().item()
    return x / (1 + scale)


def drawn_crop(self: Odd, x: Tensor) -> Tensor:
    """With one place to choose from."""
    at = random.randrange(1)
    return x[:, :, at:]


def in_threads(self: Odd, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(self.layer(x)))
    thread.start()
    thread.join()
    return found[0]


def iterated(self: Odd, x: Tensor) -> Tensor:
    return torch.stack([each * 2 for each in x])


def with_out(self: Odd, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    with torch.no_grad():
        torch.mul(x.detach(), 2, out=y)
    return x + y


def looped(self: Odd, x: Tensor) -> Tensor:
    while float(x.detach().abs().max()) > 0.3:
        x = x / 2
    return x


def by_storage(self: Odd, x: Tensor) -> Tensor:
    return x * (2 if x.is_contiguous() else 3) * (1 if x.storage_offset() == 0 else 2)


def anomalous(self: Odd, x: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=False):
        return self.layer(x)


def lowered(self: Odd, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.layer(x)


def saved_elsewhere(self: Odd, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return self.layer(x).tanh()


def hooked_saves(self: Odd, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each * 2, lambda each: each / 2):
        return self.layer(x).tanh()


def conditional(self: Odd, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def flexible(self: Odd, x: Tensor) -> Tensor:
    return (
        torch.vmap(self.linear, in_dims=1, out_dims=1)(x.flatten(2).transpose(1, 2))
        .transpose(1, 2)
        .reshape(x.shape)
    )


def functional_jacobian(self: Odd, x: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(lambda s: (s * 2).tanh(), self.scale.flatten())
    return x * found.sum()


def weight_written(self: Odd, x: Tensor) -> Tensor:
    self.layer.weight.data.clamp_(-0.1, 0.1)
    found: Tensor = self.layer(x)
    return found


def scripted(odd: Odd) -> None:
    odd.inner = torch.jit.script(Scripted())


def traced_inner(odd: Odd) -> None:
    odd.inner = torch.jit.trace(nn.Tanh(), torch.zeros(1))


def forward_hooks(odd: Odd) -> None:
    odd.layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    odd.layer.register_forward_hook(lambda module, args, result: result.tanh())


def backward_hooks(odd: Odd) -> None:
    odd.layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))


def clipping_backward_hooks(odd: Odd) -> None:
    odd.layer.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0].clamp(-1e-3, 1e-3),)
    )


def backward_pre_hooks(odd: Odd) -> None:
    odd.layer.register_full_backward_pre_hook(
        lambda module, outputs: (outputs[0].clamp(-1e-4, 1e-4),)
    )


BELOW = "inside of torch.func"
PART = "would see a part of the gradient"
DIVIDED = "is not possible with a tensor that is divided"
CASES: dict[str, Case] = {
    "vmap of samples": Case(per_sample, BELOW),
    "vmap of weights": Case(vmapped_weights),
    "vmap of a layer": Case(flexible, BELOW),
    "func.grad": Case(gradient_of_function, BELOW),
    "func.jvp": Case(jvp, BELOW),
    "functional_call": Case(functional),
    "jacobian of weights": Case(functional_jacobian),
    "nested tensors": Case(nested),
    "sparse matrix": Case(sparse),
    "sparse activations": Case(to_sparse),
    "complex numbers": Case(complex_numbers),
    ".data": Case(data),
    ".data written": Case(written_data),
    ".item()": Case(item),
    "float()": Case(floated),
    ".numpy()": Case(as_numpy),
    "np.asarray": Case(by_array),
    ".tolist()": Case(as_list),
    "deepcopy": Case(copied),
    "copy": Case(shallow),
    "view in place": Case(view_in_place),
    "setitem": Case(set_item, "__setitem__ cannot change"),
    "flat view in place": Case(flat_in_place, "mul_ has changed a tensor in place"),
    "gradient penalty": Case(penalty, f"odd: grad {DIVIDED}"),
    "gradient penalty of weights": Case(penalty_of_weights, f"odd: grad {PART}"),
    "gradient of weights alone": Case(weights_only_gradient),
    "backward inside": Case(backward_inside, f"odd: backward {PART}"),
    "tensor hook": Case(tensor_hook, f"odd: register_hook {DIVIDED}"),
    "hook on what is made of a weight": Case(hook_on_scaled_weight, f"odd: register_hook {PART}"),
    "retain_grad": Case(retained, f"odd: retain_grad {DIVIDED}"),
    "reentrant checkpoint": Case(reentrant),
    "checkpoint": Case(not_reentrant),
    "checkpoint of weights": Case(not_reentrant_weights),
    "subclass": Case(subclass, "a subclass of torch.Tensor"),
    "subclass of weights": Case(subclassed_weight, "a subclass of torch.Tensor"),
    "no_grad": Case(without_gradients),
    "detach": Case(detached),
    "inference_mode": Case(inference),
    "Python's random": Case(drawn_crop),
    "threads": Case(in_threads),
    "iteration": Case(iterated),
    "out=": Case(with_out, "leave out= away"),
    "loop on values": Case(looped),
    "storage": Case(by_storage, f"odd: storage_offset {DIVIDED}"),
    "detect_anomaly": Case(anomalous),
    "autocast": Case(lowered),
    "save_on_cpu": Case(saved_elsewhere),
    "saved_tensors_hooks": Case(hooked_saves),
    "cond": Case(conditional, "odd: Uncaptured.* divided among workers"),
    "weight written": Case(weight_written),
    "jit.script": Case(called, prepare=scripted),
    "jit.trace": Case(called, prepare=traced_inner),
    "forward hooks": Case(plain_layer, prepare=forward_hooks),
    "backward hooks": Case(plain_layer, "odd.layer: its backward hook", prepare=backward_hooks),
    "clipping backward hooks": Case(
        plain_layer, "odd.layer: its backward hook", prepare=clipping_backward_hooks
    ),
    "backward pre-hooks": Case(
        plain_layer, "odd.layer: its backward hook", prepare=backward_pre_hooks
    ),
    "weight_norm": Case(plain_layer, prepare=lambda odd: weight_norm(odd.layer)),
    "parametrization": Case(
        plain_layer, prepare=lambda odd: parametrizations.weight_norm(odd.layer)
    ),
    "orthogonal": Case(
        lambda self, x: self.linear(x.mean((2, 3)))[..., None, None] + x,
        prepare=lambda odd: parametrizations.orthogonal(odd.linear),
    ),
    "spectral_norm": Case(
        plain_layer, prepare=lambda odd: parametrizations.spectral_norm(odd.layer)
    ),
    "compile": Case(
        called, prepare=lambda odd: setattr(odd, "inner", torch.compile(nn.Tanh(), backend="eager"))
    ),
}


ON_BOTH = (
    ".data written",
    "view in place",
    "checkpoint",
    "threads",
    "sparse matrix",
    "forward hooks",
    "parametrization",
    "jit.script",
)
"""Of those that are exact on tiles, some on tiles and stages."""
RAISED_BELOW = ("cond",)  # by torch, and told with the layer


def model_of(case: Case) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Net(case.forward, case.prepare)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randn(4, 3, generator=generator, dtype=torch.float64),
        )
        for _ in range(2)
    ]


def plainly(case: Case, microbatches: int) -> dict[str, Tensor]:
    model = model_of(case)
    optimizer = sgd(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (F.mse_loss(model(inputs), targets) / microbatches).backward()
        optimizer.step()
    return _state(model)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: each.detach().clone() for name, each in model.state_dict().items() if each.numel()
    }


def trained(case: Case, layout: str, folder: Path) -> dict[str, Tensor]:
    """What the ranks hold, together."""
    models = [model_of(case) for _ in range(parse_layout(layout).ranks)]
    for each in models:
        each.odd.own_code = "tiles" in layout

    def body(run: Run) -> dict[str, Tensor]:
        model = models[run.rank]
        trainer = run.trainer(model, F.mse_loss, sgd, layout=layout, check=False)
        run.group.barrier()  # torch.fx traces for all threads: nobody runs a model meanwhile
        for x, y in batches():
            trainer.step(x, y)
        return _state(model)

    found = run_world(len(models), body, folder=folder)
    return {name: each for rank in found for name, each in rank.items()}


PAIRS = [
    (name, layout) for name in CASES for layout in LAYOUTS if layout != "both" or name in ON_BOTH
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_it_is_exact_or_refused_by_name(name: str, layout: str, tmp_path: Path) -> None:
    case = CASES[name]
    refusal = case.stages if layout == "stages" else case.tiles
    text = LAYOUTS[layout]
    if refusal:
        with pytest.raises(FarandoleError) as caught:
            trained(case, text, tmp_path)
        assert re.search(refusal, str(caught.value)), caught.value
        assert "Error:" not in str(caught.value) or name in RAISED_BELOW, caught.value
        return
    expected, found = plainly(case, parse_layout(text).microbatches), trained(case, text, tmp_path)
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        torch.testing.assert_close(found[key], each, rtol=1e-9, atol=1e-11, msg=key)

"""graphs.py: CUDA graphs of a model under a strategy train as the plain model does.

A graph around a whole step is refused where there are several workers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.errors import UserError
from farandole.sync import parse

run = fd.init(timeout=100)
STEPS = 12


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5)).double().to(run.device)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * run.rank + number)
    x = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    return x.to(run.device), torch.randint(5, (6,), generator=generator).to(run.device)


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, mode="reduce-overhead")  # type: ignore[return-value]


def graphed(model: nn.Module) -> nn.Module:
    return torch.cuda.make_graphed_callables(model, (batch(0)[0],))  # type: ignore[return-value]


def weights(sync: str, prepare: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), 0.2, momentum=0.9)
    model, _ = run.distribute(prepare(plain), optimizer, sync=parse(sync))
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in plain.parameters()])


def told(capture: Callable[[], object]) -> str:
    """Why a graph around it is refused: by us, whatever CUDA says of a capture that has failed."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            capture()
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, UserError):
            reason = reason.__cause__ or reason.__context__
        return str(reason)
    return "nothing"


def refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    run.distribute(model, optimizer, sync=parse("allreduce"))
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    torch.cuda.synchronize()
    said = told(optimizer.step)
    assert "a CUDA graph is being captured around a step of an optimizer" in said, said


def captured_step() -> None:
    """One worker alone may capture all of it."""
    ends = []
    for capture in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        run.distribute(model, optimizer, sync=parse("allreduce"))
        x, y = batch(0)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)  # noqa: B023
            F.cross_entropy(model(x), y).backward()  # noqa: B023
            optimizer.step()  # noqa: B023

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as PyTorch's manual has it
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if capture:
            with torch.cuda.graph(graph):
                step()
        for _ in range(STEPS):
            graph.replay() if capture else step()
        step()  # checked again
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    apart = float((ends[1] - ends[0]).abs().max())
    assert apart < 1e-9, f"a captured step: {apart} apart"


for sync in ("allreduce", "local:every=4", "lagged"):
    expected = weights(sync, as_it_is)
    for prepare in (compiled, graphed):
        apart = float((weights(sync, prepare) - expected).abs().max())
        assert apart < 1e-9, f"{sync}, {prepare.__name__}: {apart} apart"
    run.print(f"{sync}: graphs agree")
if run.size > 1:
    refused()
else:
    captured_step()
run.print("all graphs agree")

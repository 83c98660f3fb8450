"""An elastic training in Horovod's style. It kills one of its own workers in the middle, has a host
added, and one taken away; all ranks see the same batches, so that their number does not matter."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F

BATCHES = torch.arange(64.0).reshape(4, 4, 4).sin()

hvd.init()
model = torch.nn.Linear(4, 1)
torch.nn.init.constant_(model.weight, 0.1 if hvd.rank() == 0 else 7.0)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def say_hosts(hosts: str) -> None:
    if hvd.rank() == 0:
        Path("hosts.half").write_text(hosts)
        Path("hosts.half").rename("hosts")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < state.last:
        if state.step == 5 and hvd.rank() == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        inputs = BATCHES[state.step % 4]
        F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            if state.step == 8:
                say_hosts("localhost:2\n127.0.0.1:1\n")
            if state.most < hvd.size():
                state.most = hvd.size()
                if state.most == 3:
                    say_hosts("localhost:2\n")
            if state.most == 3 and hvd.size() == 2:
                state.last = min(state.last, state.step + 5)
            state.commit()
            time.sleep(0.05)


def tell_reset() -> None:
    print(f"reset: {hvd.rank()} of {hvd.size()}, on {hvd.cross_size()} hosts")


state = hvd.elastic.TorchState(model, optimizer, step=0, last=10_000, most=0)
state.register_reset_callbacks([tell_reset])
train(state)
weights = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
if hvd.rank() == 0:
    Path("result").write_text(json.dumps({"step": state.step, "weights": weights}))

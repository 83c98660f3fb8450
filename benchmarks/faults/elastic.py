"""An elastic training in Horovod's style. The result goes to a file.

All ranks see the same batches, so that the weights do not depend on how many there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hooks
import horovod.torch as hvd
import torch
import torch.nn.functional as F

BATCHES = torch.arange(64.0).reshape(4, 4, 4).sin()
STEPS = 8

hvd.init()
model = torch.nn.Linear(4, 1)
torch.nn.init.constant_(model.weight, 0.1)
torch.nn.init.zeros_(model.bias)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    named_parameters=model.named_parameters(),
)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < STEPS:
        if state.step == 4:
            hooks.reach("training", hvd.rank())
        optimizer.zero_grad()
        inputs = BATCHES[state.step % 4]
        F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        hooks.stepped(hvd.rank())
        state.step += 1
        if state.step % 2 == 0:
            state.commit()


train(hvd.elastic.TorchState(model, optimizer, step=0))
if hvd.rank() == 0:
    result = Path("result")
    result.with_suffix(".half").write_text(
        json.dumps({name: value.flatten().tolist() for name, value in model.state_dict().items()})
    )
    result.with_suffix(".half").rename(result)

"""Facts about all-reduce between real processes, a JSON file for each rank; a test judges them."""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import farandole as fd
from farandole.comm.meter import ring_bytes
from farandole.data.order import shuffled

STEPS = 20

run = fd.init(timeout=150)
facts: dict[str, object] = {}


def batch(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        x = batch(1000 * run.rank + step, 8, 1, 8, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8)).backward()
        optimizer.step()


def bits(model: nn.Module) -> str:
    tensors = model.state_dict().values()
    return b"".join(tensor.numpy().tobytes() for tensor in tensors).hex()


# The same bits as plain DDP, on one bucket and on several.
facts["same_bits"] = {}
for bucket_mib in (None, 25.0, 0.001):
    torch.manual_seed(5)
    ours, theirs = net(), net()
    theirs.load_state_dict(ours.state_dict())
    before = bits(ours)
    plain = DistributedDataParallel(theirs, bucket_cap_mb=bucket_mib)
    model, optimizer = run.distribute(
        ours, torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9), sync=fd.AllReduce(bucket_mib)
    )
    waited, sent = run.group.meter.waited_seconds, run.group.meter.bytes_sent
    train(model, optimizer)
    if bucket_mib == 25.0:
        # Each gradient, and a number that says whether there was one; a note of each rank.
        gradient_bytes = sum(p.nbytes + p.element_size() for p in ours.parameters())
        gradient_bytes += run.size * next(ours.parameters()).element_size()
        facts["waited_seconds"] = run.group.meter.waited_seconds - waited
        facts["bytes_sent"] = run.group.meter.bytes_sent - sent
        facts["bytes_expected"] = STEPS * ring_bytes(gradient_bytes, run.size)
    train(plain, torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9))
    facts["same_bits"][str(bucket_mib)] = bits(ours) == bits(theirs)
    facts["moved"] = bits(ours) != before

# In step, and not any more once a rank has changed one weight.
facts["in_step_before"] = str(run.check_in_step(model))
kept = ours[3].weight.detach().clone()
if run.rank == 1:
    with torch.no_grad():
        ours[3].weight[2, 3] += 1e-3
found = run.check_in_step(model)
facts["in_step_after"] = [bool(found), str(found)]
with torch.no_grad():
    ours[3].weight.copy_(kept)  # all that the run holds is compared after each pass

# Models that differ.
try:
    run.distribute(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 + run.rank)))
except fd.ModelMismatchError as error:
    facts["mismatch"] = str(error)

# Optimizer state comes from rank 0.
model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + run.rank, betas=(0.8, 0.9))
if run.rank == 0:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
run.distribute(model, optimizer)
state = optimizer.state_dict()
facts["optimizer"] = {
    "lr": state["param_groups"][0]["lr"],
    "step": float(state["state"][0]["step"]),
    "exp_avg": state["state"][0]["exp_avg"].tolist(),
    "betas": list(state["param_groups"][0]["betas"]),
}

# Mixed precision.
torch.manual_seed(0)
model = net()
wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
losses = []
for _ in range(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = wrapped(batch(run.rank, 8, 1, 8, 8))
        loss = F.cross_entropy(output, torch.arange(8))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
facts["autocast"] = {
    "output": str(output.dtype),
    "weights": str(model[0].weight.dtype),
    "learns": losses[-1] < losses[0],
    "in_step": bool(run.check_in_step(wrapped)),
}

# Uneven shares and a shared BatchNorm: the whole batch's gradient, to the last digits.
data = TensorDataset(batch(1, 11, 5, dtype=torch.float64), torch.arange(11) % 3)
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
alone = copy.deepcopy(model)
wrapped = run.distribute(model, sync=fd.AllReduce(batchnorm="sync"))
for x, y in run.loader(data, global_batch_size=11, shuffle=False):
    F.cross_entropy(wrapped(x), y).backward()
    facts["share"] = len(x)
F.cross_entropy(alone(data.tensors[0]), data.tensors[1]).backward()
errors = [
    (mine.grad - whole.grad).abs().max().item()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True)
]
facts["largest_error"] = max(errors)
facts["running_mean_error"] = (model[1].running_mean - alone[1].running_mean).abs().max().item()

# Epochs whose last step has fewer samples than there are ranks: the steps of one worker.
count = 2 * (2 * run.size + 1) + run.size - 1
data = TensorDataset(batch(3, count, 5, dtype=torch.float64), torch.arange(count) % 3)
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
alone = copy.deepcopy(model)
plain = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
loader = run.loader(data, global_batch_size=2 * run.size + 1)
for _ in range(3):
    order = torch.tensor(shuffled(count, run.seed, loader.epoch))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    for chosen in order.split(2 * run.size + 1):
        plain.zero_grad()
        F.cross_entropy(alone(data.tensors[0][chosen]), data.tensors[1][chosen]).backward()
        plain.step()
facts["error_of_epochs"] = max(
    (mine - whole).abs().max().item()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True)
)

# A sampler that would draw differently on each rank.
sampler = WeightedRandomSampler([1.0] * 11, 8, generator=torch.Generator().manual_seed(run.rank))
loader = run.loader(DataLoader(data, batch_size=2, sampler=sampler))
facts["drawn"] = [y.tolist() for _, y in loader]

# Numbers, and a checkpoint written by both.
facts["mean"] = run.mean(torch.tensor([1.0, run.rank], dtype=torch.bfloat16)).tolist()
facts["sum"] = [run.sum(run.rank + 0.5), int(run.sum(torch.tensor(2**60 + run.rank)))]
run.save(best=run.sum(1.0), seen=torch.arange(3))
facts["restored"] = run.load()["best"]

Path(sys.argv[1], f"{run.rank}.json").write_text(json.dumps(facts))

"""The same training under torchrun, as its documentation has it: FOLDER SECONDS.

DistributedDataParallel over gloo, and a checkpoint every few seconds. When a worker is killed,
torchrun ends the others, starts all of them again, and they go on from the checkpoint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from kills.task import GLOBAL_BATCH, SAVE_SECONDS, Notes, Numbers, new_model, new_optimizer

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
notes = Notes(folder, f"{rank}")
model = new_model()
optimizer = new_optimizer(model)
step = epoch = done = 0
checkpoint = folder / "checkpoint"
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step, epoch, done = saved["step"], saved["epoch"], saved["done"]
distributed = DistributedDataParallel(model)
data = Numbers()
began = folder / "began"
saved_at = time.monotonic()
is_over = False
while not is_over:
    sampler = DistributedSampler(data, size, rank)
    sampler.set_epoch(epoch)
    loader = DataLoader(data, GLOBAL_BATCH // size, sampler=sampler)
    for index, (x, y, _) in enumerate(loader):
        if index < done:
            continue
        optimizer.zero_grad()
        functional.cross_entropy(distributed(x), y).backward()
        optimizer.step()
        step += 1
        notes.stepped(step)
        if rank == 0 and not began.exists():
            began.write_text(str(time.monotonic()))
        if rank == 0 and time.monotonic() - saved_at > SAVE_SECONDS:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            where = {"step": step, "epoch": epoch, "done": index + 1}
            torch.save({**state, **where}, folder / "half")
            (folder / "half").replace(checkpoint)
            saved_at = time.monotonic()
    epoch, done = epoch + 1, 0
    late = torch.tensor(float(time.monotonic() - float(began.read_text()) > seconds))
    dist.all_reduce(late)
    is_over = bool(late)
dist.destroy_process_group()

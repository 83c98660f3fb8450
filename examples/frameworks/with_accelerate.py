"""A loop that uses Accelerate: it prepares the optimizer, and not the model.

pip install accelerate
farandole run -n 2 --sync local:every=4 examples/frameworks/with_accelerate.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

run = fd.init()
run.hide_from_libraries()  # Accelerate takes this process for one that is alone

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model, optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), 1e-3))

accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
for epoch in run.epochs(3):
    for x, y in run.loader(data, batch_size=32):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.observe_loss(loss.detach())
    found = (model(data.tensors[0]).argmax(dim=1) == data.tensors[1]).float().mean()
    run.log(epoch=epoch, accuracy=run.mean(found))

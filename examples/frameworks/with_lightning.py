"""A LightningModule on many workers: Lightning keeps the loop, Farandole keeps the ranks in step.

pip install lightning
farandole run -n 2 --sync local:every=4 examples/frameworks/with_lightning.py
"""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

run = fd.init()


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        run.observe_loss(loss)  # AdaComm and DASO steer by it
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        run.distribute(self, optimizer)  # here the module is where it stays
        return optimizer


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = Digits()
# One device: the processes are Farandole's. A strategy of Lightning's would be a second one.
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, run.loader(data, batch_size=32))
found = (model.net(data.tensors[0]).argmax(dim=1) == data.tensors[1]).float().mean()
run.log(accuracy=run.mean(found))

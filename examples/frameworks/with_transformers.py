"""Hugging Face's Trainer: a small GPT-2, from scratch, on many workers.

pip install transformers accelerate
farandole run -n 2 --sync local:every=4 examples/frameworks/with_transformers.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import farandole as fd

run = fd.init()
run.hide_from_libraries()  # else the Trainer would put a DistributedDataParallel around the model


class Counting(Dataset):
    """Sentences that count upwards from anywhere, modulo 32."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (index + torch.arange(16)) % 32
        return {"input_ids": words, "labels": words}


class RunTrainer(Trainer):
    """Every rank reads its share."""

    def get_train_dataloader(self) -> Any:
        return run.loader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=self.data_collator,
        )

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        run.observe_loss(result[0] if isinstance(result, tuple) else result)  # DASO steers by it
        return result


model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model, optimizer = run.distribute(model, optimizer)
arguments = TrainingArguments(
    str(run.folder / f"trainer-{run.rank}"),
    num_train_epochs=3,
    per_device_train_batch_size=16,
    use_cpu=run.device.type == "cpu",
    report_to=[],
    save_strategy="no",  # run.save() writes one checkpoint for all ranks
    disable_tqdm=True,
)
RunTrainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, None)).train()
model.eval()
said = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
right = (said[0] == 3 + torch.arange(11)).float().mean()
run.log(accuracy=run.mean(right))

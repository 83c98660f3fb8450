"""Fashion-MNIST and a network for it that a few cores can train: what the training races share."""

from __future__ import annotations

import argparse
import gc
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sides import ALLREDUCE, DDP, Side, communication
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.models import build
from farandole.models.pieces import conv, conv_norm_relu, initialise_he, pooled_head, sequence
from farandole.models.resnet import ResidualBlock

MEAN, DEVIATION = 0.286, 0.353  # of the pixels of the training set
_EVALUATION_BATCH = 500


def add_options(parser: argparse.ArgumentParser, *, samples: int, batch: int) -> None:
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--samples", type=int, default=samples, help="train on so many")
    parser.add_argument("--model", choices=["resnet", "mlp"], default="resnet")
    parser.add_argument(
        "--width", type=int, default=8, help="channels of the first stage, or of the first layer"
    )
    parser.add_argument("--batch", type=int, default=batch, help="per worker")


def read(folder: Path, kind: str, samples: int | None = None) -> TensorDataset:
    """`train` or `t10k`, from the files' own format: a short header, then bytes."""
    images, labels = (folder / f"{kind}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
    if not images.exists() or not labels.exists():
        sys.exit(
            f"Fashion-MNIST is not in {folder}. On Debian: apt install dataset-fashion-mnist; "
            "elsewhere pass --data with the folder that holds the four .gz files."
        )
    pixels = np.frombuffer(gzip.decompress(images.read_bytes()), np.uint8, offset=16)
    classes = np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)
    x = torch.tensor(pixels.reshape(-1, 1, 28, 28)[:samples], dtype=torch.float32) / 255
    y = torch.tensor(classes[:samples], dtype=torch.int64)
    return TensorDataset((x - MEAN) / DEVIATION, y)


def training_set(args: argparse.Namespace, ranks: int) -> TensorDataset:
    """Cut to whole global batches: plain DDP would not weigh a smaller last one."""
    global_batch = args.batch * ranks
    whole = args.samples - args.samples % global_batch
    if whole == 0:
        sys.exit(f"--samples {args.samples} is less than one global batch, {global_batch}.")
    return read(args.data, "train", whole)


def narrow_resnet(width: int) -> nn.Sequential:
    """ResNet-18 from `width` channels on instead of 64. The stem halves the small image at once."""
    blocks: list[tuple[str, nn.Module]] = [("stem", conv_norm_relu(1, width, 3, stride=2))]
    channels_in = width
    for stage in range(4):
        channels = width * 2**stage
        for index in range(2):
            stride = 2 if stage > 0 and index == 0 else 1
            residual = sequence(
                [
                    ("conv1", conv_norm_relu(channels_in, channels, 3, stride=stride)),
                    ("conv2", conv(channels, channels, 3)),
                    ("norm2", nn.BatchNorm2d(channels)),
                ]
            )
            shortcut: nn.Module = nn.Identity()
            if stride > 1:
                shortcut = sequence(
                    [
                        ("conv", conv(channels_in, channels, 1, stride=stride)),
                        ("norm", nn.BatchNorm2d(channels)),
                    ]
                )
            blocks.append((f"stage{stage}_block{index}", ResidualBlock(residual, shortcut)))
            channels_in = channels
    model = sequence([*blocks, ("head", pooled_head(channels_in, 10))])
    initialise_he(model)
    return model


def new_side(
    world: fd.Run,
    args: argparse.Namespace,
    name: str,
    seed: int,
    *,
    learning_rate: float,
    momentum: float = 0.9,
) -> Side:
    """The network from the same start for every side of a seed, under SGD."""
    gc.collect()  # what the last side held goes back now, not while this one is timed
    torch.manual_seed(seed)
    if args.model == "resnet":
        model: nn.Module = narrow_resnet(args.width)
    else:
        hidden = [args.width, args.width // 2]
        model = build("mlp", classes=10, image_size=28, channels=1, hidden=hidden)
    opt = torch.optim.SGD(model.parameters(), learning_rate, momentum=momentum, weight_decay=1e-4)
    return Side(world, name, model, opt, seed)


def measure_communication(
    world: fd.Run, args: argparse.Namespace, data: TensorDataset
) -> dict[str, dict[str, float]]:
    """Of the two synchronous sides: what a step takes with communication and without."""
    x, y = data[: args.batch]
    found = {}
    for name in (ALLREDUCE, DDP):
        side = new_side(world, args, name, 0, learning_rate=0.01)
        found[name] = communication(side, x, y, steps=4, blocks=5)
        world.print(
            f"{name}: a step takes {found[name]['step_ms']:.1f} ms, without communication "
            f"{found[name]['compute_ms']:.1f}: {found[name]['share']:.0%} of it is communication"
        )
    return found


@torch.no_grad()
def evaluate(side: Side, data: TensorDataset) -> tuple[float, float]:
    """*Together.* Mean loss and accuracy on `data`; each rank takes its part, in eval mode."""
    x, y = (tensor[side.run.rank :: side.run.size] for tensor in data.tensors)
    side.plain.eval()
    loss, correct = 0.0, 0
    for images, labels in zip(x.split(_EVALUATION_BATCH), y.split(_EVALUATION_BATCH), strict=True):
        scores = side.plain(images)
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
        correct += int((scores.argmax(dim=1) == labels).sum())
    side.plain.train()
    return side.run.sum(loss) / len(data), side.run.sum(float(correct)) / len(data)

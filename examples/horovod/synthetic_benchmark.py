"""Training throughput on random images with Horovod.

horovodrun -np 4 python synthetic_benchmark.py --model vgg8 --batch-size 32
"""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MODELS = {"tiny": (8, 16), "small": (32, 64, 128), "vgg8": (64, 128, 256, 512, 512)}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", choices=MODELS, default="tiny")
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--batch-size", type=int, default=32, help="per worker")
parser.add_argument("--num-warmup-batches", type=int, default=5)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=5)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--no-cuda", action="store_true")
args = parser.parse_args()


def convnet(widths, classes=1000):
    layers = []
    for before, width in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers)


hvd.init()
cuda = torch.cuda.is_available() and not args.no_cuda
name = "GPU" if cuda else "CPU"
device = torch.device("cpu")
if cuda:
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())

model = convnet(MODELS[args.model]).to(device)
lr_scaler = 1 if args.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
target = torch.randint(1000, (args.batch_size,), device=device)


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    if cuda:
        torch.cuda.synchronize()


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


log(f"Model: {args.model}, {sum(p.numel() for p in model.parameters()):,} parameters")
log(f"Batch size: {args.batch_size}")
log(f"Number of {name}s: {hvd.size()}")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
img_secs = []
for i in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    img_secs.append(args.batch_size * args.num_batches_per_iter / seconds)
    log(f"Iter #{i}: {img_secs[-1]:.1f} img/sec per {name}")

mean, spread = np.mean(img_secs), 1.96 * np.std(img_secs)
log(f"Img/sec per {name}: {mean:.1f} +- {spread:.1f}")
total, spread = hvd.size() * mean, hvd.size() * spread
log(f"Total img/sec on {hvd.size()} {name}(s): {total:.1f} +- {spread:.1f}")

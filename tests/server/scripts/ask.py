"""A client in a process of its own: sends a tensor in shared memory and one that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import zmq

from farandole.server.channels import Line
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.messages import Command, Kind, Read
from farandole.server.protocol.seal import read_key

key, address = sys.argv[1:]
arena = Arena.make(2**20)
line = Line(zmq.Context(), read_key(Path(key)), address, arena)
shared, into = arena.take(400_000), arena.take(400_000)
assert shared is not None
assert into is not None
values = torch.arange(100_000.0)
shared.view(torch.float32).copy_(values)
line.send(
    [
        Command(Kind.PUSH, 1, values=shared.view(torch.float32)),
        Command(Kind.PUSH, 1, values=values),
        Read(1, ticket=1, into=into.view(torch.float32)),
    ]
)
while not (answers := line.receive()):
    line.socket.poll(100)
print("sent" if line.unshared else "shared", into.view(torch.float32).sum().item())
line.close()

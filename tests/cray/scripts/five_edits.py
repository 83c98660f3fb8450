"""A serial script with the plugin's five edits, for two models with a team each."""

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.cray as mc  # 1

with pytest.raises(fd.UserError, match=r"fd.cray.init\(\)"):
    mc.get_rank()
run = mc.init(teams=2, seed=None)  # 2
mc.config_team(0, print_every=5)
mc.config_team(1, first_k=2, max_steps=10)
rank, size = mc.get_rank(), mc.get_nranks()

torch.manual_seed(rank)
generator, critic = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
assert mc.check_buffers_match(generator) == (size == 1)
mc.broadcast(generator)  # 3
assert mc.check_buffers_match(generator)
mc.check_buffers_match(critic, fix=True)
assert mc.check_buffers_match(critic)
buffer = torch.full((2,), float(rank))
mc.broadcast([buffer], root=size - 1)
assert buffer.tolist() == [size - 1.0] * 2

whole = nn.Linear(3, 2).double()
whole.load_state_dict(generator.state_dict())
plain = torch.optim.SGD(whole.parameters(), 0.1)
first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
draw = torch.Generator().manual_seed(7)
for _ in range(10):
    x = torch.randn(4 * size, 3, dtype=torch.float64, generator=draw)
    first.zero_grad()
    (generator(x[rank::size]) ** 2).mean().backward()
    mc.gradients(generator, team=0)  # 4
    first.step()
    second.zero_grad()
    (critic(generator(x[rank::size]).detach()) ** 2).mean().backward()
    mc.gradients([p.grad for p in critic.parameters()], team=1)
    second.step()
    plain.zero_grad()
    (whole(x) ** 2).mean().backward()
    plain.step()

for mine, its in zip(generator.parameters(), whole.parameters(), strict=True):
    assert torch.allclose(mine, its, rtol=0, atol=1e-12)
assert mc.check_buffers_match(critic)
assert mc.average(float(rank)) == (size - 1) / 2
assert mc.statistics(1).steps == 10
with pytest.raises(fd.UserError, match="no team 2"):
    mc.gradients(generator, team=2)
mc.barrier()
mc.finalize()  # 5
print("done", flush=True)

"""Direct calls of collectives, without training a model.

farandole run -n 3 examples/collectives.py
"""

import torch

import farandole as fd

run = fd.init()
group = run.group

# Every rank has its own data. All ranks compute the histogram of all data.
samples = torch.randn(10_000, generator=torch.Generator().manual_seed(run.rank))
histogram = torch.histc(samples, bins=40, min=-4, max=4)
handle = group.start(group.all_reduce, histogram)  # runs in the background
mean = run.mean(float(samples.mean()))  # runs after the all-reduce
total = int(handle.wait().sum())
run.print(f"{total} of {run.size * 10_000} samples lie within 4 sigma; their mean is {mean:+.4f}")

# Another algorithm gives exactly the same sum, because the counts are whole numbers.
by_ring = torch.histc(samples, bins=40, min=-4, max=4)
assert torch.equal(group.all_reduce(by_ring, algorithm="ring"), histogram)

# Gather the outliers of all ranks. Their number differs from rank to rank.
outliers = samples[samples.abs() > 3.5]
found = group.all_gather(outliers)
run.print("outliers by rank:", [len(part) for part in found])
assert torch.equal(found[run.rank], outliers)

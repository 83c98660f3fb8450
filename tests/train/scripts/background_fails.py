"""The last save, in the background, cannot be written: the script has ended by then.

Usage: background_fails.py FOLDER
"""

import resource
import sys

import torch

import farandole as fd

run = fd.init(name="fails", folder=sys.argv[1])
run.distribute(torch.nn.Linear(1, 1))
run.save(number=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))  # as a full disk, for this process alone
run.save(number=2, large=torch.zeros(2**16), background=True)
print("the script has done its part")

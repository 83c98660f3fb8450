#!/usr/bin/env bash
# All tests of tests/gpu, on the first GPU of this machine, within ten minutes. The log is kept in
# benchmarks/results/gpu_tests.log. A newer NCCL than PyTorch's: LD_PRELOAD=…/libnccl.so.2
set -uo pipefail
cd "$(dirname "$0")/.."
log=benchmarks/results/gpu_tests.log
export FARANDOLE_TEST_GPU=1
{
  date
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  "${PYTHON:-python}" -c "
import torch
from farandole.comm.gpu_sharing import nccl_text
print('torch', torch.__version__, 'NCCL', nccl_text())"
  timeout 600 "${PYTHON:-python}" -m pytest -v -n 0 --timeout 120 --durations 10 tests/gpu
} 2>&1 | tee "$log"

"""`import farandole.horovod.keras as hvd`: Horovod's functions for Keras, on Farandole.

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), …)
    model.fit(…, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

For Keras 3 on TensorFlow; `horovod.tensorflow.keras` is the same. docs/tensorflow.md says what
differs from Horovod's own.
"""

from __future__ import annotations

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.keras import callbacks, elastic
from farandole.horovod.keras.collectives import (
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)
from farandole.horovod.keras.loading import load_model
from farandole.horovod.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from farandole.horovod.tensorflow.absent import named
from farandole.horovod.tensorflow.basics import init
from farandole.horovod.tensorflow.compression import Compression
from farandole.horovod.tensorflow.functions import broadcast_global_variables
from farandole.horovod.torch.basics import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from farandole.horovod.torch.operations import Adasum, Average, Max, Min, Product, Sum

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

__getattr__ = named("horovod.keras")

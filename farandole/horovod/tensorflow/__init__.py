"""`import farandole.horovod.tensorflow as hvd`: Horovod's functions for TensorFlow, on Farandole.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

docs/tensorflow.md says what differs from Horovod's own.
"""

from __future__ import annotations

from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow import elastic
from farandole.horovod.tensorflow.absent import BroadcastGlobalVariablesHook, named
from farandole.horovod.tensorflow.basics import (
    barrier,
    init,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from farandole.horovod.tensorflow.compression import Compression
from farandole.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from farandole.horovod.tensorflow.movements import (
    allgather,
    alltoall,
    broadcast,
    grouped_allgather,
)
from farandole.horovod.tensorflow.optimizer import DistributedOptimizer
from farandole.horovod.tensorflow.reducescatter import grouped_reducescatter, reducescatter
from farandole.horovod.tensorflow.reductions import allreduce, grouped_allreduce
from farandole.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from farandole.horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
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
from farandole.horovod.torch.operations import Adasum, Average, Max, Min, Product, ReduceOp, Sum

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

__getattr__ = named("horovod.tensorflow")

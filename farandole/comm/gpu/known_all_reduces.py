"""All-reduces of tensors on GPUs that are like earlier ones, from the script to NCCL in few steps.

On the long way (`Group`, `Queue`, `DirectCollectives`, a transport, another one) it is found out
what carries the tensor, by which algorithm, and what the ranks must claim; that takes as long as
NCCL needs for a short message. It depends on the kind of the tensor alone, so it is looked up here.
The rest is the same: the order of collectives, the comparison of claims, what is counted, and what
errors say. Whatever is not usual takes the long way.
"""

from __future__ import annotations

import time

import torch

from farandole.comm.arithmetic import Op
from farandole.comm.choice import AUTO
from farandole.comm.collective_scope import CollectiveScopes
from farandole.comm.meter import Meter, ring_bytes
from farandole.comm.queue import Queue
from farandole.comm.tensors import claim_of
from farandole.comm.transports.agreement_beside import AgreementBeside
from farandole.comm.transports.base import NATIVE
from farandole.comm.transports.by_device import ByDevice
from farandole.comm.transports.claims import DisagreementError
from farandole.errors import FarandoleError
from farandole.trace.spans import NO_TRACE

_MOST_KNOWN = 4096  # on this rank: others may forget at another moment, and take longer
_Kind = tuple[int, torch.dtype, torch.Size, Op]


class KnownAllReduces:
    """Those of one rank of a group; `beside` carries them out."""

    def __init__(
        self,
        transport: ByDevice,
        beside: AgreementBeside,
        queue: Queue,
        meter: Meter,
        scopes: CollectiveScopes,
    ) -> None:
        self._transport = transport
        self._beside = beside
        self._queue = queue
        self._meter = meter
        self._scopes = scopes
        self._known: dict[_Kind, tuple[str, int]] = {}  # what is claimed, and the bytes sent

    def learn(self, tensor: torch.Tensor, op: Op, algorithm: str) -> None:
        """All ranks have reduced it together, the long way."""
        where = self._transport.place_of(tensor)
        if not where or algorithm not in (AUTO, NATIVE) or tensor.is_complex():
            return
        claim = claim_of("all_reduce", tensor, op, NATIVE, *where)
        if self._beside.knows(claim):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            sent = ring_bytes(tensor.nbytes, self._transport.size)
            self._known[tensor.get_device(), tensor.dtype, tensor.shape, op] = claim, sent

    def reduce(self, tensor: torch.Tensor, op: Op, algorithm: str) -> bool:
        """Whether it is reduced now. If not, nothing was done."""
        found = self._known.get((tensor.get_device(), tensor.dtype, tensor.shape, op))
        if found is None or algorithm not in (AUTO, NATIVE):
            return False
        scopes, meter, beside, (claim, sent) = self._scopes, self._meter, self._beside, found
        is_usual = scopes.trace is NO_TRACE and not scopes.is_broken and self._queue.idle
        is_plain = tensor.is_contiguous() and not tensor.is_neg()
        if not (is_usual and is_plain and beside.knows(claim)):
            return False
        if tensor.requires_grad:
            tensor = tensor.detach()  # as on the long way: what is done here has no gradient
        begun = time.perf_counter()
        meter.activity.begin_wait()
        try:
            beside.repeat(tensor, op, claim)
        except FarandoleError as error:
            sent = 0
            if isinstance(error, DisagreementError):
                beside.heard(error.claims)
            better = scopes.explain("all_reduce", error)
            if better is None:
                raise
            raise better from error
        except BaseException:
            sent = 0
            raise
        finally:
            meter.activity.end_wait()
            meter.add_call(begun, sent)
        return True

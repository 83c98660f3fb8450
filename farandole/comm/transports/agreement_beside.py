"""All-reduces by NCCL whose ranks compare their claims while it is at work already.

    a call that is new     claim ── all claim the same ── NCCL connects ── NCCL at work
    one that is known      claim ── NCCL at work
                             ╰───── all claim the same ── return

To compare first costs as much as a short all-reduce itself. To compare before the call returns
costs next to nothing: NCCL takes longer to begin than a claim to arrive. A call of ranks that did
different things raises, and leaves its tensor with any numbers. NCCL cannot take back what it was
given, so it is aborted then, with all that it has under way between these ranks, and later
collectives of tensors on GPUs are refused by all of them.

Averages of gradients make no claims, here or elsewhere. A rank that calls an all-reduce while
another is in a backward pass is found out only if the other calls something else next.

A call that is new is agreed on first, because in its first one of a kind NCCL connects: there a
host waits for the other hosts, which may never come. So is one by a schedule of ours, which hosts
carry out message by message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.comm.arithmetic import Op
from farandole.comm.transports.base import NATIVE
from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.claims import DisagreementError, decode_claim, encode_claim
from farandole.comm.transports.shm.transport import SharedMemory
from farandole.errors import CommError

_MOST_KNOWN = 4096
_REFUSAL = (
    "tensors on GPUs can no longer travel in this group. Its ranks did different things before, "
    "when NCCL was at work already, and what it has begun cannot be taken back. Start again."
)


class AgreementBeside:
    """`host` compares claims, `wire` is what has NCCL."""

    def __init__(self, host: SharedMemory, wire: C10d) -> None:
        self._host = host
        self._wire = wire
        self._known: set[str] = set()  # calls that all ranks have made together before
        self._aborted = False

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str) -> None:
        if claim not in self._known or algorithm != NATIVE:
            self._host.agree(claim)
            self._wire.all_reduce(flat, op, algorithm, None)
            if algorithm == NATIVE and self._wire.reduces_natively(flat, op):
                self._remember(claim)
            return
        self.repeat(flat, op, claim)

    def knows(self, claim: str) -> bool:
        """Whether all ranks have made this call together before, and can go on to."""
        return claim in self._known and not self._aborted

    def repeat(self, tensor: torch.Tensor, op: Op, claim: str) -> None:
        """A call that is known, of a contiguous tensor of any shape. Who hears that ranks differ
        tells `heard`."""
        host = self._host
        claimed = host.begin_agree(claim)
        try:
            self._wire.nccl_all_reduce(tensor, op)
        finally:
            # Also after an error here: the others wait for this rank to compare.
            try:
                host.end_agree(claimed)
            except DisagreementError:
                raise  # whoever hears of it asks `heard`
            except BaseException:  # a rank is lost, or somebody has pressed Ctrl-C
                self._abort()
                raise

    def heard(self, claims: Sequence[str]) -> None:
        """Ranks claim this at the same time. All hear the same and know the same calls, so all
        abort, or none."""
        if any(claim != claims[0] for claim in claims) and not self._known.isdisjoint(claims):
            self._abort()

    def require_usable(self) -> None:
        if self._aborted:
            raise CommError(_REFUSAL)

    def _remember(self, claim: str) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(decode_claim(encode_claim(claim)))  # as others hear of it

    def _abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._wire.abort_nccl()

"""Claims in shared memory: compared in every meeting, also where nobody has to write them again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from farandole.comm import SharedMemory
from farandole.comm.transports.inprocess import Exchange, InProcess
from farandole.errors import CommError

SOON = timedelta(seconds=20)


def test_a_mismatch_is_named_after_any_number_of_agreements() -> None:
    exchange = Exchange(2, SOON)
    calls = ["same"] * 3 + ["own"] + ["same"] * 2 + ["own"] * 2 + ["other", "same"]

    def body(rank: int) -> list[str]:
        transport = SharedMemory.connect(InProcess(exchange, rank))
        heard = []
        for call in calls:
            claim = f"rank {rank}'s" if call == "own" else call
            try:
                transport.agree(claim)
                heard.append("")
            except CommError as error:
                heard.append(str(error))
            assert transport.share(claim) == (
                ["rank 0's", "rank 1's"] if call == "own" else [claim] * 2
            )
        transport.close()
        return heard

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(body, range(2))
    assert first == second
    for call, message in zip(calls, first, strict=True):
        assert bool(message) is (call == "own")
        assert not message or "rank 0 calls rank 0's, rank 1 calls rank 1's" in message

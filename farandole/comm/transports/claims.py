"""Claims: what each rank says that it is about to do, so that a mismatch is found and named.

Every claim has the same length. Ranks exchange claims before they know whether they agree about
anything else, so the exchange itself must not depend on what they call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from farandole.errors import CommError

CLAIM_BYTES = 256


class DisagreementError(CommError):
    """Ranks that claim different things; `claims` are those of all, in rank order."""

    def __init__(self, claims: Sequence[str], one: int, other: int) -> None:
        self.claims = tuple(claims)
        super().__init__(
            f"the ranks are not doing the same: rank {one} calls {claims[one]}, rank {other} calls "
            f"{claims[other]}. All must call the same collectives, with the same shapes and "
            "dtypes, in the same order."
        )


@functools.lru_cache(maxsize=1024)
def encode_claim(claim: str) -> bytes:
    """As a frame of bytes; one that is too long ends in a digest, so that it still tells apart."""
    text = claim.encode(errors="surrogatepass")
    if len(text) > CLAIM_BYTES:
        digest = hashlib.blake2b(text, digest_size=8).hexdigest().encode()
        text = text[: CLAIM_BYTES - len(digest) - 3] + b"..." + digest
    return text.ljust(CLAIM_BYTES, b"\0")


def decode_claim(frame: bytes) -> str:
    return frame.rstrip(b"\0").decode(errors="replace")


def require_agreement(claims: Sequence[str]) -> None:
    """Raises `DisagreementError` naming the first rank that claims something else than rank 0."""
    for rank, claim in enumerate(claims):
        if claim != claims[0]:
            raise DisagreementError(claims, 0, rank)

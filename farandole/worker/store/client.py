"""Our store as PyTorch sees it: a `torch.distributed.Store` in Python.

PyTorch's C++ code (prefix stores, gloo, NCCL) calls these methods from any thread, and takes the
GIL to do so; waiting for the server releases it. Each call uses a connection that is idle, or a
new one, so a call that waits does not hold up others.

PyTorch calls the Python methods `set`, `get`, `compare_set`, `add`, `getNumKeys`, `deleteKey`,
`check`, `wait`, `append`, `multi_get`, `multi_set`, `clone` and `has_extended_api` by these names.
Queues and `list_keys` have no such way from C++: they work on this object, and not through a
`PrefixStore`, where PyTorch raises NotImplementedError.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    QueueEmptyError,
    Store,
)

from farandole.errors import CommError
from farandole.worker.store import protocol
from farandole.worker.store.address import StoreAddress
from farandole.worker.store.connection import StoreConnection
from farandole.worker.store.protocol import NUMBER

_RETRY_SECONDS = 0.02


class StoreClient(Store):
    """The store at `address`. Waits up to `timeout` for it to answer, and for each key later.

    Raises `DistNetworkError` where nobody answers, or does not hold the token; `DistStoreError`
    when a key does not come in time, or a request is refused.
    """

    def __init__(self, address: StoreAddress, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._address = address
        # Parent and child of a fork share the connections. If both used one, each could read the
        # other's answers, so the child opens its own.
        self._process = os.getpid()
        self._idle = [self._connect_patiently(timeout.total_seconds())]

    def keep(self) -> Self:
        """Keeps this object until the process ends.

        For a store that C++ objects use: they do not keep it alive, and would call a dead one.
        """
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Ends the connections that are idle. Others end with their call."""
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:
        self._idle = getattr(self, "_idle", [])  # none where nobody answered
        self.close()

    # What PyTorch calls.

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(protocol.SET, (key.encode(), _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(protocol.GET, (key.encode(),), (key,))[0]

    def add(self, key: str, amount: int) -> int:
        return _number(self._ask(protocol.ADD, (key.encode(), NUMBER.pack(amount))))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        fields = (key.encode(), _bytes(expected), _bytes(desired))
        return self._ask(protocol.COMPARE_SET, fields)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(protocol.CHECK, [key.encode() for key in keys])[0] == b"\1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(protocol.WAIT, [key.encode() for key in keys], keys, timeout)

    def num_keys(self) -> int:
        return _number(self._ask(protocol.COUNT, ()))

    def delete_key(self, key: str) -> bool:
        return self._ask(protocol.DELETE, (key.encode(),))[0] == b"\1"

    getNumKeys = num_keys  # noqa: N815  (as C++ calls it)
    deleteKey = delete_key  # noqa: N815

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(protocol.APPEND, (key.encode(), _bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(protocol.MULTI_GET, [key.encode() for key in keys], keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(protocol.MULTI_SET, [f for k, v in pairs for f in (k.encode(), _bytes(v))])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> StoreClient:
        return StoreClient(self._address, self._limit()).keep()

    # What only Python calls.

    def list_keys(self) -> list[str]:
        return [key.decode(errors="backslashreplace") for key in self._ask(protocol.LIST, ())]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(protocol.PUSH, (key.encode(), _bytes(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Raises `QueueEmptyError` where it is empty and `block` is False."""
        return self._ask(protocol.POP, (key.encode(), b"\1" if block else b"\0"), (key,))[0]

    def queue_len(self, key: str) -> int:
        return _number(self._ask(protocol.QUEUE_LENGTH, (key.encode(),)))

    def _ask(
        self,
        what: int,
        fields: Sequence[bytes],
        awaited: Sequence[str] = (),
        timeout: timedelta | None = None,
    ) -> list[bytes]:
        limit = self._limit() if timeout is None else timeout
        seconds = max(limit.total_seconds(), 0.001)
        if self._process != os.getpid():  # a fork: the connections are its parent's
            self._idle, self._process = [], os.getpid()
        link = None
        try:
            try:
                link = self._idle.pop()
            except IndexError:
                link = self._address.connect(seconds)
            status, answer = link.ask(what, fields, seconds)
        except BaseException as error:
            if link is not None:
                link.close()  # the answer may still come: nobody must take it for another's
            if isinstance(error, TimeoutError):
                shown = ", ".join(awaited) or "none: the store's server does not answer"
                raise DistStoreError(f"wait timeout after {limit}, keys: {shown}") from None
            if isinstance(error, protocol.RefusedError):
                raise DistStoreError(str(error)) from None
            if isinstance(error, OSError | CommError):
                raise DistNetworkError(f"the store at {self._address}: {error}") from None
            raise
        # Only a connection whose answer has been read in full is used again.
        self._idle.append(link)
        if status == protocol.REFUSED:
            raise DistStoreError(answer[0].decode())
        if status == protocol.EMPTY:
            raise QueueEmptyError("queue is empty")
        return answer

    def _limit(self) -> timedelta:
        """It is in the C++ part, where PyTorch may change it."""
        found: timedelta = self.timeout  # type: ignore[attr-defined]
        return found

    def _connect_patiently(self, seconds: float) -> StoreConnection:
        """The server may not be there yet."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._address.connect(max(deadline - time.monotonic(), 0.001))
            except OSError as error:
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise DistNetworkError(f"the store at {self._address}: {error}") from None
                time.sleep(_RETRY_SECONDS)
            except CommError as error:
                raise DistNetworkError(f"the store at {self._address}: {error}") from None


class Prefixed(PrefixStore):
    """A part of `store`, which it keeps alive. For Python's use alone."""

    def __init__(self, prefix: str, store: StoreClient) -> None:
        super().__init__(prefix, store)
        self._kept = store


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _number(answer: Sequence[bytes]) -> int:
    return int(NUMBER.unpack(answer[0])[0])

"""What a store holds: keys with values, queues, and who waits for a key. No sockets here.

The operations mean what they mean in PyTorch's TCPStore. One thread uses a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from farandole.worker.store.protocol import MAX_STORE_BYTES, RefusedError

_ENTRY_BYTES = 200  # what Python needs for a key and a value beside their bytes, about
_INT64 = range(-(2**63), 2**63)


class Waiter:
    """Somebody who waits for keys. `ready` is called once, when each has been there."""

    __slots__ = ("missing", "ready")

    def __init__(self, missing: set[bytes], ready: Callable[[], None]) -> None:
        self.missing = missing
        self.ready = ready


class Table:
    """Holds up to `limit` bytes; what would be more is refused with `RefusedError`."""

    def __init__(self, limit: int = MAX_STORE_BYTES) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Waiter, None]] = {}  # in the order in which they came
        self._limit = limit
        self._held = 0

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> list[bytes]:
        return list(self._values)

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        if old is None:
            self._reserve(_ENTRY_BYTES + len(key) + len(value))
        else:
            self._reserve(len(value) - len(old))
        self._values[key] = value
        if key in self._waiting:
            self._wake(key)

    def append(self, key: bytes, value: bytes) -> None:
        self.set(key, self._values.get(key, b"") + value)

    def add(self, key: bytes, amount: int) -> int:
        old = self._values.get(key, b"0")
        try:
            total = int(old) + amount
        except ValueError:
            raise RefusedError(
                f"add: the value of {_shown(key)} is {_shown(old)}, which is not a number"
            ) from None
        if total not in _INT64:
            raise RefusedError(f"add: {total} for {_shown(key)} has more than 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Returns what is there afterwards; `expected` where the key is not there at all."""
        old = self._values.get(key)
        if old == expected or (old is None and not expected):
            self.set(key, desired)
            return desired
        return expected if old is None else old

    def delete(self, key: bytes) -> bool:
        old = self._values.pop(key, None)
        if old is None:
            return False
        self._held -= _ENTRY_BYTES + len(key) + len(old)
        return True

    def has(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values or key in self._queues for key in keys)

    # Queues. An empty one is not there.

    def push(self, key: bytes, value: bytes) -> None:
        self._reserve(_ENTRY_BYTES + len(key) + len(value))
        self._queues.setdefault(key, deque()).append(value)
        for waiter in self._waiting.get(key, ()):  # one value is for one of them
            # The waiter leaves all lists before it is called, because it may wait again for the
            # same key.
            self.forget(waiter)
            waiter.ready()
            break

    def pop(self, key: bytes) -> bytes | None:
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        self._held -= _ENTRY_BYTES + len(key) + len(value)
        if not queue:
            del self._queues[key]
        return value

    def queue_length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    # Those who wait.

    def wait(self, keys: Sequence[bytes], ready: Callable[[], None]) -> Waiter | None:
        """None when all keys are there already, and `ready` is not called."""
        missing = {key for key in keys if not self.has((key,))}
        if not missing:
            return None
        waiter = Waiter(missing, ready)
        for key in missing:
            self._waiting.setdefault(key, {})[waiter] = None
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """It waits no more."""
        for key in waiter.missing:
            others = self._waiting.get(key)
            if others is not None:
                others.pop(waiter, None)
                if not others:
                    del self._waiting[key]
        waiter.missing.clear()

    def _wake(self, key: bytes) -> None:
        # The key is taken out first: `ready` may wait for it again, for instance when it was
        # deleted.
        for waiter in self._waiting.pop(key):
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.ready()

    def _reserve(self, more: int) -> None:
        if self._held + more > self._limit:
            raise RefusedError(
                f"the store is full: it holds {self._held} bytes, the limit is {self._limit}"
            )
        self._held += more


def _shown(text: bytes) -> str:
    return repr(text[:100].decode(errors="backslashreplace"))

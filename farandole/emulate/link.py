"""The link of an emulated host: how fast, how far, and how to tell the kernel so.

Rates are written as `tc` writes them: 1gbit is 10⁹ bits per second of Ethernet frames, of which
TCP's payload is 1448 in 1514 bytes: 95.6 %.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from farandole.emulate.namespaces import call
from farandole.errors import LaunchError, UserError

_RATE_UNITS: Final = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_DELAY_UNITS: Final = {"us": 1, "ms": 10**3, "s": 10**6}
_MIN_BITS, _MAX_BITS = 10**5, 10**11
_MAX_DELAY_MICROSECONDS = 10**7
_FRAME_BYTES = 1514


@dataclass(frozen=True)
class Link:
    """A rate in either direction, and a delay from this host to any other."""

    bits_per_second: int
    delay_microseconds: int = 0

    @classmethod
    def parse(cls, rate: str, delay: str | None = None) -> Link:
        """From "1gbit" and "1ms". Raises `UserError` for what is neither or out of bounds."""
        bits = _read(rate, _RATE_UNITS)
        if bits is None or not _MIN_BITS <= bits <= _MAX_BITS:
            raise UserError(
                f"rate {rate!r}: write a number and a unit (kbit, mbit, gbit: bits per second), "
                "from 100kbit to 100gbit, such as 1gbit."
            )
        if delay is None:
            return cls(bits)
        microseconds = _read(delay, _DELAY_UNITS)
        if microseconds is None or not 1 <= microseconds <= _MAX_DELAY_MICROSECONDS:
            raise UserError(
                f"delay {delay!r}: write a number and a unit (us, ms, s), from 1us to 10s, such as "
                "1ms; leave it out for none."
            )
        return cls(bits, microseconds)

    @property
    def burst_bytes(self) -> int:
        """How much may pass at once after a pause: what the link carries in 1 ms.

        Less, and at 1 Gbit/s the bucket overflows while the kernel is busy elsewhere: bandwidth
        that is lost. More, and short messages pass faster than the rate.
        """
        return max(self._bytes_in(1_000), 4 * _FRAME_BYTES)

    @property
    def queue_bytes(self) -> int:
        """How much may wait: 25 ms, so that several senders to one receiver seldom lose packets."""
        return self.burst_bytes + max(self._bytes_in(25_000), 256 * 1024)

    @property
    def queue_packets_with_delay(self) -> int:
        """The same while delayed, for then all that is under way waits too. Counted in packets,
        some of which are short."""
        waiting = self.queue_bytes + self._bytes_in(self.delay_microseconds)
        return max(1000, 2 * waiting // _FRAME_BYTES)

    def shape(self, namespace: str, interface: str, *, with_delay: bool) -> None:
        """Caps what leaves through `interface`, and delays it if asked to.

        Raises `UserError` when a delay is wanted and the kernel has no netem.
        """
        add = ("tc", "-n", namespace, "qdisc", "add", "dev", interface)
        call(*add, "root", "handle", "1:", "tbf", "rate", f"{self.bits_per_second}bit",
             "burst", str(self.burst_bytes), "limit", str(self.queue_bytes))  # fmt: skip
        if not (with_delay and self.delay_microseconds):
            return
        try:
            call(*add, "parent", "1:1", "handle", "10:", "netem", "limit",
                 str(self.queue_packets_with_delay), "delay",
                 f"{self.delay_microseconds}us")  # fmt: skip
        except LaunchError as error:
            raise UserError(
                f"this kernel cannot delay packets: it has no netem (module sch_netem). Leave the "
                f"delay of {self.delay_microseconds} us out, or try `modprobe sch_netem`. ({error})"
            ) from None

    def _bytes_in(self, microseconds: int) -> int:
        return self.bits_per_second * microseconds // 8_000_000


def _read(text: str, units: dict[str, int]) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        return None
    return round(float(found[1]) * units[found[2]])

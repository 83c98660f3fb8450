"""A link between hosts as people describe it: its rate and its delay. No torch, no sockets.

Rates are written as `tc` writes them: 1gbit is 10⁹ bits per second of Ethernet frames, of which
TCP's payload is 1448 in 1514 bytes: 95.6 %.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from farandole.errors import UserError

_RATE_UNITS: Final = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_DELAY_UNITS: Final = {"us": 1, "ms": 10**3, "s": 10**6}
_MIN_BITS, _MAX_BITS = 10**5, 10**11
_MAX_DELAY_MICROSECONDS = 10**7
FRAME_BYTES = 1514
_PAYLOAD_BYTES = 1448  # of a frame


@dataclass(frozen=True)
class NetworkLink:
    """A rate in either direction, and a delay from this host to any other."""

    bits_per_second: int
    delay_microseconds: int = 0

    @classmethod
    def parse(cls, rate: str, delay: str | None = None) -> Self:
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

    @classmethod
    def read(cls, text: str) -> Self:
        """From "200mbit,1ms" or "200mbit": the rate, and the delay if there is one."""
        rate, *rest = text.split(",")
        if len(rest) > 1:
            raise UserError(
                f"link {text!r}: write a rate and perhaps a delay, such as 200mbit,1ms."
            )
        return cls.parse(rate, *rest)

    def __str__(self) -> str:
        units = (("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3))
        unit, size = next(pair for pair in units if self.bits_per_second >= pair[1])
        rate = f"{self.bits_per_second / size:.4g} {unit}"
        if not self.delay_microseconds:
            return rate
        return f"{rate}, {self.delay_microseconds / 1000:.4g} ms"

    @property
    def delay_seconds(self) -> float:
        return self.delay_microseconds / 1e6

    def seconds(self, payload_bytes: int) -> float:
        """How long the frames of a message occupy the link."""
        frames = -(-payload_bytes // _PAYLOAD_BYTES)
        on_wire = payload_bytes + frames * (FRAME_BYTES - _PAYLOAD_BYTES)
        return on_wire * 8 / self.bits_per_second


def _read(text: str, units: dict[str, int]) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        return None
    return round(float(found[1]) * units[found[2]])

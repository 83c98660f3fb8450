"""The link of an emulated host: how to tell the kernel how fast it is, and how far."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.emulate.namespaces import call
from farandole.errors import LaunchError, UserError
from farandole.network_link import FRAME_BYTES, NetworkLink


@dataclass(frozen=True)
class ShapedLink(NetworkLink):
    """Shapes the interfaces of an emulated host."""

    @property
    def burst_bytes(self) -> int:
        """How much may pass at once after a pause: what the link carries in 1 ms.

        Less, and at 1 Gbit/s the bucket overflows while the kernel is busy elsewhere: bandwidth
        that is lost. More, and short messages pass faster than the rate.
        """
        return max(self._bytes_in(1_000), 4 * FRAME_BYTES)

    @property
    def queue_bytes(self) -> int:
        """How much may wait: 25 ms, so that several senders to one receiver seldom lose packets."""
        return self.burst_bytes + max(self._bytes_in(25_000), 256 * 1024)

    @property
    def queue_packets_with_delay(self) -> int:
        """The same while delayed, for then all that is under way waits too. Counted in packets,
        some of which are short."""
        waiting = self.queue_bytes + self._bytes_in(self.delay_microseconds)
        return max(1000, 2 * waiting // FRAME_BYTES)

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

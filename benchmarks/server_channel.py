"""The servers' channel against ZeroMQ's CURVE: round trips between two processes over loopback TCP.

    python benchmarks/server_channel.py [--seconds 0.4] [--rounds 9]

Three sockets between the same two processes, used in turn: bare (no protection: the floor), ours
(AES-256-GMAC by `Seal`: proves who sent it) and CURVE (XSalsa20-Poly1305 by libsodium: also hides
it). Each message goes there and comes back, cut and joined as the servers do it. What is printed is
the median over the rounds, and the ratio of CURVE's time to ours.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy
import zmq
from common import save

from farandole.server.protocol.handshake import Hello, Welcome, client_seal, server_seal
from farandole.server.protocol.seal import KEY_BYTES, Seal
from farandole.server.protocol.sockets import arrived, open_socket, send

SIDES = ("bare", "ours", "curve")
SIZES = {"1 KiB": 2**10, "256 KiB": 2**18, "4 MiB": 2**22}
KEY = bytes(range(KEY_BYTES))
LIMIT_SECONDS = 20.0


class Channel:
    """One end. With a seal, every message is signed and checked, as `Port` and `Line` do it."""

    def __init__(self, socket: zmq.Socket[Any], seal: Seal | None) -> None:
        self.socket = socket
        self._seal = seal

    def send(self, frames: Sequence[bytes | memoryview], peer: bytes | None = None) -> None:
        head = [] if peer is None else [peer]
        seal = [] if self._seal is None else [self._seal.sign(frames)]
        send(self.socket, [*head, *seal, *frames], track=False)

    def take(self, *, routed: bool) -> tuple[bytes | None, list[memoryview]] | None:
        """The next message that is there, and from whom."""
        for frames in arrived(self.socket):
            peer = bytes(frames.pop(0)) if routed else None
            if self._seal is not None:
                self._seal.check(frames[0], frames[1:])
                frames = frames[1:]
            return peer, frames
        return None


@dataclass(frozen=True)
class Keys:
    """What both ends know."""

    hello: Hello
    welcome: Welcome
    public: bytes  # CURVE's, of the server
    secret: bytes

    @classmethod
    def make(cls) -> Keys:
        return cls(Hello.make("benchmark", None), Welcome.make(""), *zmq.curve_keypair())


def open_server(context: zmq.Context[Any], side: str, keys: Keys) -> Channel:
    socket = open_socket(context, zmq.ROUTER)
    if side == "curve":
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.curve_server = True
    socket.bind("tcp://127.0.0.1:*")
    return Channel(socket, server_seal(KEY, keys.hello, keys.welcome) if side == "ours" else None)


def open_client(context: zmq.Context[Any], side: str, address: str, keys: Keys) -> Channel:
    socket = open_socket(context, zmq.DEALER)
    if side == "curve":
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = keys.public
    socket.connect(address)
    return Channel(socket, client_seal(KEY, keys.hello, keys.welcome) if side == "ours" else None)


def serve(pipe: Connection, keys: Keys) -> None:
    """The other process: sends every message back where it came from, until it hears `stop`."""
    context: zmq.Context[Any] = zmq.Context()
    channels = {side: open_server(context, side, keys) for side in SIDES}
    poller = zmq.Poller()
    for channel in channels.values():
        poller.register(channel.socket, zmq.POLLIN)
    pipe.send(
        {
            side: channel.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            for side, channel in channels.items()
        }
    )
    while not pipe.poll():
        for socket, _ in poller.poll(200):
            channel = next(one for one in channels.values() if one.socket is socket)
            taken = channel.take(routed=True)
            if taken is not None:
                channel.send(taken[1], taken[0])
    for channel in channels.values():
        channel.socket.close()
    context.term()


def round_trip(channel: Channel, message: memoryview) -> None:
    """A small first frame and the payload, as messages of the servers are."""
    channel.send([b"head" * 16, message])
    deadline = time.monotonic() + LIMIT_SECONDS
    while (taken := channel.take(routed=False)) is None:
        if not channel.socket.poll(1000) and time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {LIMIT_SECONDS:g} s")
    assert len(taken[1][1]) == len(message)


def seconds_per_trip(channel: Channel, message: memoryview, seconds: float) -> float:
    round_trip(channel, message)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        round_trip(channel, message)
        count += 1
    return passed / count


def measure(channels: dict[str, Channel], seconds: float, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, size in SIZES.items():
        message = numpy.random.default_rng(0).integers(0, 256, size, numpy.uint8).data
        taken: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(rounds):
            for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
                taken[side].append(seconds_per_trip(channels[side], message, seconds))
        middle = {side: statistics.median(values) for side, values in taken.items()}
        found[name] = {
            side: {
                "microseconds": round(1e6 * middle[side], 1),
                "gigabytes_per_second": round(2 * size / middle[side] / 1e9, 3),
                "all_microseconds": [round(1e6 * value, 1) for value in taken[side]],
            }
            for side in SIDES
        }
        found[name]["curve_over_ours"] = round(middle["curve"] / middle["ours"], 2)
        print(
            f"{name:>8}: "
            + "  ".join(
                f"{side} {found[name][side]['microseconds']:9.1f} µs "
                f"{found[name][side]['gigabytes_per_second']:6.3f} GB/s"
                for side in SIDES
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each side in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-save", action="store_true")
    given = parser.parse_args()
    keys = Keys.make()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, keys), daemon=True
    )
    process.start()
    there.close()
    context: zmq.Context[Any] = zmq.Context()
    channels = {
        side: open_client(context, side, address, keys) for side, address in here.recv().items()
    }
    try:
        found = measure(channels, given.seconds, given.rounds)
    finally:
        here.send("stop")
        process.join(5)
        for channel in channels.values():
            channel.socket.close()
        context.term()
    ratios = {name: sizes["curve_over_ours"] for name, sizes in found.items()}
    if not given.no_save:
        save("server_channel", {"zmq": zmq.zmq_version(), "sizes": found})
    print("CURVE / ours: " + ", ".join(f"{name} {ratio}x" for name, ratio in ratios.items()))


if __name__ == "__main__":
    main()

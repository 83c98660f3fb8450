"""Is the cap of an emulated link real? 20 MB over TCP between two hosts, against the rate.

Each transfer is timed by its sender, from the first byte to the receiver's answer to the last, in
both directions in turn. Ethernet, IP and TCP headers take 4.4 % of the rate, so 0.956 is the most
that TCP can carry for long. Target: from 0.80 to 1.05. Needs root.

    python benchmarks/emulated_link.py
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import save, spread

if TYPE_CHECKING:
    from farandole.emulate.cluster import Cluster

PORT = 5001
LOWEST, HIGHEST = 0.80, 1.05


def receive(count: int) -> None:
    buffer = bytearray(1 << 20)
    with socket.create_server(("", PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    with connection:
        while count > 0:
            got = connection.recv_into(buffer)
            if got == 0:
                raise SystemExit(f"the sender left {count} bytes before the end")
            count -= got
        connection.sendall(b"!")


def send(address: str, count: int) -> None:
    """Prints how many seconds it took."""
    data = bytes(count)
    with socket.create_connection((address, PORT)) as connection:
        begin = time.perf_counter()
        connection.sendall(data)
        connection.recv(1)
        print(time.perf_counter() - begin)


def transfer(cluster: Cluster, source: int, target: int, count: int) -> float:
    """Seconds for `count` bytes from one host to another."""
    script = [sys.executable, Path(__file__).resolve(), "--bytes", str(count)]
    receiver = cluster.start(target, [*script, "--receive"], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    address = cluster.addresses[target]
    sender = cluster.start(source, [*script, "--send", address], stdout=subprocess.PIPE)
    said, _ = sender.communicate(timeout=300)
    receiver.communicate(timeout=60)
    return float(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--bytes", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        receive(args.bytes)
        return
    if args.send:
        send(args.send, args.bytes)
        return

    # Not above: senders and receivers start this script too, and need not wait for torch.
    from farandole.emulate.cluster import Cluster

    with Cluster(hosts=2, rate=args.rate) as cluster:
        seconds = [
            transfer(cluster, source, 1 - source, args.bytes)
            for _ in range(args.repeats)
            for source in (0, 1)
        ]
        bits_per_second = cluster.link.bits_per_second
    ratios = [args.bytes * 8 / taken / bits_per_second for taken in seconds]
    save(
        "emulated_link",
        {
            "target_ratio": [LOWEST, HIGHEST],
            "ratio": spread(ratios),
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
            "seconds": spread(seconds),
            "rate": args.rate,
            "bytes": args.bytes,
            "repeats": args.repeats,
        },
    )
    print(f"from {min(ratios):.3f} to {max(ratios):.3f} of {args.rate}")
    print(f"ratio {spread(ratios)['median']:.3f}")


if __name__ == "__main__":
    main()

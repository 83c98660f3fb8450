"""`python -m farandole.launch.backends.ray.bridge ADDRESS NAMESPACE ACTOR COMMAND…`

Runs COMMAND through an actor of the cluster, as if it were a child of this process: standard input,
output and errors, and the exit code.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from farandole.launch.backends.ray.cluster import connect
from farandole.launch.backends.ray.node import END, ERRORS, OUTPUT

_CHUNK = 2**18
_LOST = 255
_START_SECONDS = 100.0
_CALL_SECONDS = 100.0  # for the answer of a call that waits for a few seconds at most


def bridge(address: str, namespace: str, name: str, command: list[str]) -> int:
    """The exit code of the command."""
    try:
        connect(address, namespace)
        actor = ray.get_actor(name)
        ray.get(actor.start.remote(command), timeout=_START_SECONDS)
        threading.Thread(target=_pass_input, args=(actor,), daemon=True).start()
        return _pass_output(actor)
    except RayActorError as error:
        return _give_up(f"the node of the Ray actor {name} was lost: {error}")
    except (RayError, ValueError, ConnectionError) as error:
        return _give_up(f"the Ray actor {name} does not answer: {error}")


def _pass_input(actor: Any) -> None:
    while True:
        data = os.read(sys.stdin.fileno(), _CHUNK)
        # Waits for each: calls that overlap may be carried out in another order.
        ray.get(actor.write.remote(data))
        if not data:
            return


def _pass_output(actor: Any) -> int:
    descriptors = {OUTPUT: sys.stdout.fileno(), ERRORS: sys.stderr.fileno()}
    while True:
        kind, data = ray.get(actor.read.remote(), timeout=_CALL_SECONDS)
        if kind == END:
            return int(data)
        while data and kind in descriptors:
            data = data[os.write(descriptors[kind], data) :]


def _give_up(message: str) -> int:
    first = message.strip().splitlines()
    print("\n".join(first[:8]), file=sys.stderr, flush=True)
    return _LOST


def _main() -> None:
    address, namespace, name, *command = sys.argv[1:]
    code = bridge(address, namespace, name, command)
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)  # without Ray's own end, which takes a while


if __name__ == "__main__":
    _main()

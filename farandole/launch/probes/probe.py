"""Answers questions about the host on which it runs; started there like a worker, by ssh.

Questions come on standard input and answers go to standard output, a line of JSON each. The end of
standard input ends it: the launcher is done, or gone. It listens only when asked to, at the address
of the interface that leads to the launcher.

    {"do": "facts", "files": {"folder": "/home/ann", "script": "train.py", …}}   → {"facts": {…}}
    {"do": "clock"}                                                              → {"clock": 1.7e9}
    {"do": "listen", "towards": "10.0.0.1", "interfaces": [], "token": "…"}      → {"address": …}
    {"do": "measure", "address": …, "port": …, "token": "…", "bandwidth": true}  → {"figures": {…}}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from farandole.errors import FarandoleError
from farandole.launch.backends.remote.frames import MARK
from farandole.launch.host_facts import JobFiles, facts_of_this_host
from farandole.launch.probes.link_test import Listener, measure
from farandole.worker.network import address_for

_LIFE_SECONDS = 900  # whatever happens, it does not stay longer
_MOST_BYTES = 2**20  # of a question

_listeners: list[Listener] = []  # kept until the end: a listener that is collected is closed


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """What goes wrong is an answer too: `error` says it."""
    try:
        return _ANSWERS[question["do"]](question)
    except (FarandoleError, OSError) as error:
        return {"error": str(error)}
    except (KeyError, TypeError, ValueError) as error:
        return {"error": f"no question for this version of Farandole: {error!r}"}


def _facts(question: Mapping[str, Any]) -> dict[str, Any]:
    return {"facts": asdict(facts_of_this_host(JobFiles(**question["files"])))}


def _clock(question: Mapping[str, Any]) -> dict[str, Any]:
    return {"clock": time.time()}


def _listen(question: Mapping[str, Any]) -> dict[str, Any]:
    address = address_for([question["towards"]], question["interfaces"])
    listener = Listener(address, question["token"].encode())
    _listeners.append(listener)
    return {"address": listener.address, "port": listener.port}


def _measure(question: Mapping[str, Any]) -> dict[str, Any]:
    figures = measure(
        question["address"],
        question["port"],
        question["token"].encode(),
        bandwidth=question["bandwidth"],
    )
    return {"figures": asdict(figures)}


_ANSWERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "facts": _facts,
    "clock": _clock,
    "listen": _listen,
    "measure": _measure,
}


def _main() -> None:
    signal.alarm(_LIFE_SECONDS)
    os.write(sys.stdout.fileno(), MARK)  # some shells print something before it
    while line := sys.stdin.readline(_MOST_BYTES):
        try:
            sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
            sys.stdout.flush()
        except OSError:  # nobody reads any more
            return


if __name__ == "__main__":
    _main()

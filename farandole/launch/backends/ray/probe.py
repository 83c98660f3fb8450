"""`python -m farandole.launch.backends.ray.probe ADDRESS`: prints the address of a Ray cluster.

Ray's core ends the whole process, by SIGABRT, where a cluster does not let it in: one that asks for
a token, say. No `except` sees that. So a process of its own tries the connection first, and the
launcher says what became of it. `auto` is resolved there too, so that the launcher and its bridges
connect to the one cluster that has answered.
"""

from __future__ import annotations

import os
import subprocess
import sys

from farandole.errors import LaunchError
from farandole.launch.backends.ray.cluster import connect, import_ray, no_cluster

_PROBE = "farandole.launch.backends.ray.probe"
_SECONDS = 120.0
_NO_CLUSTER = 3  # the exit code; the last line of the output then says why
_SHOWN_LINES = 8


def find_cluster(address: str) -> str:
    """The address of the cluster that answers at `address`, which may be `auto`.

    Raises `LaunchError` where none does, where it refuses us and where it does not answer in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROBE, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise no_cluster(address, f"no answer within {_SECONDS:g} s.") from None
    printed = done.stdout.splitlines() or [""]
    if done.returncode == 0:
        return printed[-1]
    if done.returncode == _NO_CLUSTER:
        raise LaunchError(printed[-1])
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    raise LaunchError(
        f"Ray ended its own process (exit code {done.returncode}) when it connected to the cluster "
        f"at {address!r}. If you mean another one, name it: --ray-address HOST:6379. If you mean "
        "this one, `ray status` must succeed first. Ray said last:\n"
        + "\n".join(said[-_SHOWN_LINES:])
    )


def _main() -> None:
    try:
        connect(sys.argv[1], "farandole-probe")
    except LaunchError as error:
        print(error, flush=True)
        os._exit(_NO_CLUSTER)
    print(import_ray().get_runtime_context().gcs_address, flush=True)
    os._exit(0)  # without Ray's own end, which takes a while


if __name__ == "__main__":
    _main()

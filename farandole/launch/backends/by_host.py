"""Workers on several hosts: those of this one are started directly, the others through agents."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.launch.backends.base import Backend, Worker, WorkerSpec
from farandole.worker.network import is_here


class BackendByHost:
    """`remote` is None where no other host can reach the launcher."""

    def __init__(self, local: Backend, remote: Backend | None) -> None:
        self._local = local
        self._remote = remote

    def reaches(self, host: str) -> bool:
        return is_here(host) or self._remote is not None

    def expect(self, host: str, workers: int) -> None:
        self._backend(host).expect(host, workers)

    def await_hosts(self, received: Sequence[str]) -> None:
        if self._remote is not None:
            self._remote.await_hosts(received)

    def start(self, spec: WorkerSpec) -> Worker:
        return self._backend(spec.host).start(spec)

    def mark_interrupted(self) -> None:
        self._local.mark_interrupted()
        if self._remote is not None:
            self._remote.mark_interrupted()

    def close(self) -> None:
        self._local.close()
        if self._remote is not None:
            self._remote.close()

    def _backend(self, host: str) -> Backend:
        if is_here(host):
            return self._local
        assert self._remote is not None, f"no backend reaches {host}"
        return self._remote

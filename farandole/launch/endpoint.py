"""Where workers reach their launcher: the job's store, its address, the interfaces to use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.worker.network import interface_towards
from farandole.worker.store.address import LOOPBACK
from farandole.worker.store.job_store import JobStore

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_INTERFACES = (_GLOO_INTERFACE, "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class LauncherEndpoint:
    """The store listens on `address`; workers of other hosts reach it there if it `is_shared`."""

    store: JobStore
    address: str = LOOPBACK
    is_shared: bool = False
    interfaces: Sequence[str] = ()  # that all hosts share, if the system shall not choose

    def local_variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """For a worker of this host, which is `given` other variables."""
        variables = {**self.store.here().variables(), **self._common()}
        chosen = {**os.environ, **given, **variables}
        if self.is_shared and _GLOO_INTERFACE not in chosen:
            # Else gloo takes the address of the host's own name, which is often a loopback one.
            interface = interface_towards(self.address)
            if interface is not None:
                variables[_GLOO_INTERFACE] = interface
        return variables

    def remote_variables(self) -> dict[str, str]:
        """For a worker of another host."""
        return {**self.store.elsewhere().variables(), **self._common()}

    def _common(self) -> dict[str, str]:
        """PyTorch's own clients, those of scripts that call `init_process_group` themselves, find
        the store by MASTER_ADDR and MASTER_PORT."""
        chosen = dict.fromkeys(_INTERFACES, ",".join(self.interfaces))
        return {
            **(chosen if self.interfaces else {}),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

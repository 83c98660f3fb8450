"""Asks which hosts there are, again and again, beside everything else that the launcher does.

A question may take long, or fail: then what was found before holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

_PAUSE_SECONDS = 1.0


class Discovery:
    """`hosts` is the last answer, None before the first; `error` why the last question failed."""

    def __init__(self, discover: Callable[[], Mapping[str, int]]) -> None:
        self.hosts: Mapping[str, int] | None = None
        self.error: Exception | None = None
        self._discover = discover
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="discovery", daemon=True)

    def start(self) -> None:
        """Returns when there is a first answer. What the first question raises is raised here."""
        self.hosts = dict(self._discover())
        self._thread.start()

    def stop(self) -> None:
        """Asks no more. A question that is open is not waited for."""
        self._stopped.set()

    def _ask(self) -> None:
        while not self._stopped.wait(_PAUSE_SECONDS):
            try:
                self.hosts = dict(self._discover())
                self.error = None
            except Exception as error:  # whatever the user's code raises
                self.error = error

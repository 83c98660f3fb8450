"""HOROVOD_LOG_LEVEL: how much the workers say of what they do, on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from farandole.errors import UserError, nearest

LOGGER = logging.getLogger("farandole.horovod")

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is standard error at the time, which a test or a notebook may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_level(environ: Mapping[str, str]) -> None:
    """As the variable says; warnings and worse if it says nothing."""
    name = environ.get("HOROVOD_LOG_LEVEL", "").upper() or "WARNING"
    if name not in _LEVELS:
        raise UserError(f"HOROVOD_LOG_LEVEL={name}: no such level. {nearest(name, _LEVELS)}")
    LOGGER.setLevel(_LEVELS[name])
    if not LOGGER.handlers:
        handler = _Lines()
        handler.setFormatter(logging.Formatter("farandole: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False

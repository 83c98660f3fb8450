"""HOROVOD_LOG_LEVEL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farandole.errors import UserError
from farandole.horovod.logs import LOGGER, set_level


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level, propagate, handlers = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    yield
    LOGGER.setLevel(level)
    LOGGER.propagate = propagate
    LOGGER.handlers[:] = handlers


def test_warnings_are_shown_and_more_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    set_level({})
    LOGGER.info("little")
    LOGGER.warning("much")
    assert capsys.readouterr().err == "farandole: much\n"
    set_level({"HOROVOD_LOG_LEVEL": "info"})
    LOGGER.info("little")
    assert capsys.readouterr().err == "farandole: little\n"
    set_level({"HOROVOD_LOG_LEVEL": "FATAL"})
    LOGGER.error("much")
    assert capsys.readouterr().err == ""


def test_a_level_that_is_none() -> None:
    with pytest.raises(UserError, match="HOROVOD_LOG_LEVEL=WARN: no such level"):
        set_level({"HOROVOD_LOG_LEVEL": "warn"})

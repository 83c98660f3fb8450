"""An object travels, or the reason why it cannot; damage is one of Horovod's errors."""

from __future__ import annotations

import pytest
import torch

from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.engine.objects import dump, dump_refusal, load


def test_an_object_arrives() -> None:
    found = load(memoryview(dump({"lr": 0.1, "weights": torch.ones(2)})))
    assert found["lr"] == 0.1
    assert found["weights"].tolist() == [1, 1]


def test_a_refusal_is_raised_where_it_arrives() -> None:
    with pytest.raises(UserError, match="because é"):
        load(dump_refusal("because é"))


def test_what_cannot_be_sent_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"^a is a object, which cannot be saved or sent"):
        dump({"a": object()})


@pytest.mark.parametrize("data", [b"", b"Fd", bytes(dump([1]))[:-1], b"pickle me" + bytes(9)])
def test_damage_is_horovod_s_internal_error(data: bytes) -> None:
    with pytest.raises(HorovodInternalError, match="arrived damaged"):
        load(data)

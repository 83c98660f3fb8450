"""The key's file, and seals: what is altered, repeated, missing or from elsewhere does not pass."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server.protocol.seal import BadSeal, Gap, Seal, make_key, read_key

A, B = b"a" * 32, b"b" * 32
FRAMES = [b"header", b"first tensor", b"second tensor"]


def ends() -> tuple[Seal, Seal]:
    return Seal(outgoing=A, incoming=B), Seal(outgoing=B, incoming=A)


def check(end: Seal, seal: bytes, frames: list[bytes]) -> None:
    end.check(memoryview(seal), frames)


def test_a_key_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = make_key(path)
    assert read_key(path) == key
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_key(tmp_path / "another") != key


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("precious")
    with pytest.raises(UserError, match=f"{path} already"):
        make_key(path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_that_cannot_be_written_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        make_key(tmp_path / "key")
    assert not list(tmp_path.iterdir())


def test_no_folder_for_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing/key: No such file or directory"):
        make_key(tmp_path / "missing" / "key")
    with pytest.raises(UserError, match=r"missing/key: No such file or directory"):
        read_key(tmp_path / "missing" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    make_key(path)
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:o}.*chmod 600 {path}"):
        read_key(path)


def test_a_key_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    make_key(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to user"):
        read_key(path)


@pytest.mark.parametrize("length", [0, 31, 33, 4096])
def test_a_key_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(length))
    path.chmod(0o600)
    with pytest.raises(UserError, match=f"{path} has {length} bytes, not 32"):
        read_key(path)


def test_a_pipe_is_no_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(UserError, match="is not a file"):
        read_key(tmp_path / "key")


def test_messages_pass_in_both_directions_in_order() -> None:
    client, server = ends()
    for count in (1, 2, 3):
        check(server, client.sign(FRAMES[:count]), FRAMES[:count])
        check(client, server.sign(FRAMES[:count]), FRAMES[:count])


@given(st.data())
def test_nothing_that_is_altered_passes(data: st.DataObject) -> None:
    """Any bit, of any frame or of the seal."""
    client, server = ends()
    parts = [client.sign(FRAMES), *FRAMES]
    which = data.draw(st.integers(0, len(parts) - 1))
    bit = data.draw(st.integers(0, 8 * len(parts[which]) - 1))
    altered = bytearray(parts[which])
    altered[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadSeal, match="not sealed"):
        check(server, *_split([*parts[:which], bytes(altered), *parts[which + 1 :]]))
    check(server, parts[0], FRAMES)  # what was sent itself is still welcome


@pytest.mark.parametrize(
    "frames",
    [
        [],
        FRAMES[:1],
        FRAMES[:2],
        FRAMES[1:],
        [*FRAMES, b"more"],
        [*FRAMES, b""],
        [FRAMES[0], FRAMES[2], FRAMES[1]],
        [FRAMES[0], FRAMES[1], FRAMES[1]],
        [FRAMES[0], FRAMES[1] + FRAMES[2]],
    ],
)
def test_frames_of_a_message_belong_together(frames: list[bytes]) -> None:
    client, server = ends()
    with pytest.raises(BadSeal, match="not sealed"):
        check(server, client.sign(FRAMES), frames)


def test_bytes_cannot_wander_between_the_seal_and_the_header() -> None:
    """Tag 0 covers both; the count of frames in it says where one ends."""
    client, server = ends()
    seal = client.sign(FRAMES)
    shorter, last_tag = seal[:-32] + seal[-16:], seal[-32:-16]
    with pytest.raises(BadSeal, match="not sealed"):
        check(server, shorter, [last_tag + FRAMES[0], FRAMES[1]])


def test_a_replay_is_refused_and_changes_nothing() -> None:
    client, server = ends()
    first, second = client.sign(FRAMES), client.sign(FRAMES)
    check(server, first, FRAMES)
    with pytest.raises(BadSeal, match="replayed"):
        check(server, first, FRAMES)
    check(server, second, FRAMES)


def test_a_missing_message_is_noticed_at_the_next() -> None:
    client, server = ends()
    client.sign(FRAMES)
    with pytest.raises(Gap):
        check(server, client.sign(FRAMES), FRAMES)


def test_a_message_is_not_accepted_by_its_own_sender_nor_with_other_keys() -> None:
    client, _ = ends()
    seal = client.sign(FRAMES)
    for end in (client, Seal(outgoing=B, incoming=B), Seal(outgoing=B, incoming=b"c" * 32)):
        with pytest.raises(BadSeal, match="not sealed"):
            check(end, seal, FRAMES)


def _split(parts: list[bytes]) -> tuple[bytes, list[bytes]]:
    return parts[0], parts[1:]

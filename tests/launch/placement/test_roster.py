"""A host file that changes while a job runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.errors import UserError
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.placement.placement import HostOptions, place
from farandole.launch.placement.roster import HostRoster


def test_a_change_holds_when_it_is_seen_twice(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text('[[host]]\nname = "192.0.2.1"\nslots = 2\n')
    options = HostOptions(hostfile=file)
    placement = place(options, None)
    assert placement is not None
    roster = HostRoster(options, placement.entries, placement.channel)
    assert roster.slots() == {"192.0.2.1": 2}
    file.write_text('[[host]]\nname = "192.0.2.9"\nslots = 3\nport = 2222\n')
    assert roster.slots() == {"192.0.2.1": 2}
    assert roster.slots() == {"192.0.2.9": 3}
    assert isinstance(roster.channel, Ssh)
    assert "2222" in roster.channel.words("192.0.2.9", ["true"])
    file.write_text("[[host]]\n")
    assert roster.slots() == {"192.0.2.9": 3}
    with pytest.raises(UserError, match="has no name"):
        roster.slots()
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        roster.slots()
    file.write_text('[[host]]\nname = "192.0.2.9"\nslots = 3\nport = 2222\n')
    assert roster.slots() == {"192.0.2.9": 3}

"""How bytes travel between ranks."""

from farandole.comm.group import Group
from farandole.comm.inprocess import Exchange, InProcessGroup
from farandole.comm.meter import Meter

__all__ = ["Exchange", "Group", "InProcessGroup", "Meter"]

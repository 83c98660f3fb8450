"""What Horovod's users catch, under the names they know."""

from __future__ import annotations

from farandole.errors import CommError


class HorovodInternalError(CommError, RuntimeError):
    """A collective failed: a rank died, left, or asked for something else than the others.

    The message names the tensor and the ranks. Under `hvd.elastic.run` it makes the workers go back
    to the last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  (Horovod's name)
    """Workers came or are to go. `skip_sync`: nobody came, so the state need not be sent around."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the workers of this job change")
        self.skip_sync = skip_sync


class NotInitialisedError(HorovodInternalError, ValueError):
    """`hvd.init()` has not been called, or `hvd.shutdown()` has.

    In Horovod it is a `ValueError` where one asks for a rank or a size, and where one asks for a
    collective a `HorovodInternalError`. This is both.
    """

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")

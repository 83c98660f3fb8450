"""The drop-in for Horovod: `import farandole.horovod.torch as hvd`, and the script stays as it is.

Nothing heavy is imported here: this is also what `import horovod` means under
`farandole run --horovod`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
"""Of the Horovod whose interface this is: scripts compare it."""


def __getattr__(name: str) -> Any:
    if name == "run":
        from farandole.horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

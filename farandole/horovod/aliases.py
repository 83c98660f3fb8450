"""Makes `import horovod.torch`, and every other Horovod name, mean Farandole's own modules.

The modules are the very same objects under both names, so that there is one state: what
`horovod.torch.init()` has begun, `farandole.horovod.torch` knows of. A script may call `install()`
itself. For scripts that shall not be changed the launcher puts the folder `shim` first on
PYTHONPATH: the `horovod` in it does nothing but call `install()`, in every process that imports it,
and wins over a Horovod that is installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from farandole.errors import UserError

_THEIRS = "horovod"
_OURS = "farandole.horovod"
_SHIM = Path(__file__).with_name("shim")
_OTHER_PARTS = {
    "mxnet": "for MXNet keep Horovod itself, or port the model to PyTorch",
    "spark": "start the script with `farandole horovodrun`, or a function with horovod.run()",
    "ray": "start the script with `farandole horovodrun`, or a function with horovod.run()",
    "tensorflow.data": "read the data with tf.data.experimental.service, or a share on each rank",
}


def install() -> None:
    """From now on `horovod` and everything below it are ours, in this process.

    Raises `UserError` when another Horovod is imported already: two at once would not agree.
    """
    taken = [
        name
        for name, module in sys.modules.items()
        if name.startswith(f"{_THEIRS}.") and not module.__name__.startswith(_OURS)
    ]
    if taken:
        raise UserError(
            f"another Horovod is imported already ({', '.join(sorted(taken)[:3])}). Call "
            "farandole.horovod.aliases.install() before the first `import horovod`."
        )
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())  # before the finder of files, which would load twice
    sys.modules[_THEIRS] = importlib.import_module(_OURS)


def shim_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What makes `horovod` ours in a Python that is started with it, and in those it starts."""
    before = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(_SHIM), *([before] if before else [])])}


class _Aliases(MetaPathFinder):
    """Finds `horovod.X` in `farandole.horovod.X`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, _, rest = fullname.partition(".")
        if first != _THEIRS:
            return None
        parts = _OTHER_PARTS.items()
        advice = next((tip for part, tip in parts if f"{rest}.".startswith(f"{part}.")), None)
        if advice is not None:
            raise ModuleNotFoundError(
                f"{fullname} is not here: of Horovod's front-ends Farandole has horovod.torch, "
                f"horovod.tensorflow and horovod.keras; {advice}.",
                name=fullname,
            )
        real = f"{_OURS}.{rest}" if rest else _OURS
        found = _spec_of(real)
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} is not here. Farandole has what Horovod documents for PyTorch, "
                "TensorFlow and Keras: horovod.torch, horovod.tensorflow, horovod.keras, "
                "horovod.tensorflow.keras, horovod.run and horovod.common.exceptions; and of its "
                "inner parts horovod.common.util and horovod.runner.util.threads.",
                name=fullname,
            )
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Alias(real), origin=found.origin, is_package=is_package)


def _spec_of(real: str) -> ModuleSpec | None:
    try:
        return find_spec(real)
    except ModuleNotFoundError:  # not even the package that it would be in
        return None


class _Alias(Loader):
    """Loads a module by its real name, and puts it where the other name looks for it."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual empty one. It is not kept: given the real one, Python would rename it."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._real)

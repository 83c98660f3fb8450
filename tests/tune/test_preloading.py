"""Which modules of a script are imported once for all trials."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("optuna")


def test_only_libraries_that_are_known_to_be_safe(tmp_path: Path) -> None:
    from farandole.tune.preloading import modules_of

    script = tmp_path / "train.py"
    script.write_text(
        "import os, numpy as np, mpi4py.MPI\nfrom sklearn.datasets import load_digits\n"
        "from . import near\nimport farandole as fd\nif True:\n    import scipy\n"
    )
    metrics = "torch.utils.tensorboard"
    assert modules_of(script) == [metrics, "numpy", "sklearn.datasets"]
    script.write_text("import numpy as\n")
    assert modules_of(script) == [metrics]
    assert modules_of(tmp_path / "none.py") == [metrics]


@pytest.mark.parametrize("parallel", [None, 3])
def test_what_was_begun_early_is_what_the_trials_want(
    parallel: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farandole.environment import PRELOAD
    from farandole.launch.forks import Forks
    from farandole.tune.options import TuneOptions
    from farandole.tune.preloading import begin_preloading
    from farandole.tune.slots import slots_here

    class Begun:
        def wait(self) -> bool:
            return True

        def close(self) -> None:
            pass

    begun: list[str] = []

    def begin(environment: Mapping[str, str]) -> Begun:
        begun.append(environment[PRELOAD])
        return Begun()

    monkeypatch.setattr(Forks, "begin", begin)
    options = TuneOptions(command=("none.py",), workers=2, parallel=parallel, metric="loss")
    warm = begin_preloading(options)
    assert begun == ["torch.utils.tensorboard"]
    assert warm.prepare({slots_here(2, parallel, gpus=0).workers_here})
    assert len(begun) == 1  # the same one

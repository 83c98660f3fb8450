"""Which modules of a script are imported once for all trials."""

from __future__ import annotations

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

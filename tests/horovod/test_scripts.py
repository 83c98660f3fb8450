"""Scripts as Horovod's users have them, without an edit: they run, learn, and keep in step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPTS = Path(__file__).parents[2] / "examples" / "horovod"
RUNS = [
    ["mnist.py", "--epochs", "5"],
    ["mnist.py", "--epochs", "1", "--use-adasum", "--fp16-allreduce"],
    ["synthetic_benchmark.py", "--image-size", "16", "--batch-size", "4", "--num-iters", "2"],
    ["elastic.py", "--epochs", "3"],
]
# Each script as Python runs it, and then a look at what it has left behind.
ONE_AFTER_ANOTHER = """
import hashlib, json, runpy, sys
from pathlib import Path
import horovod.torch as hvd

folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
for number, words in enumerate(runs):
    sys.argv = [str(folder / words[0]), *words[1:]]
    names = runpy.run_path(sys.argv[0], run_name="__main__")
    parameters = names["model"].parameters()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()
    state = names.get("state")
    found = {"digest": digest, "epoch": state and state.epoch, "size": hvd.size()}
    Path(f"{number}.{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()
"""


def test_every_script_is_run_and_knows_horovod_alone() -> None:
    scripts = {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}
    assert scripts.keys() == {words[0] for words in RUNS}
    for text in scripts.values():
        assert "import horovod.torch as hvd\n" in text
        assert "farandole" not in text.lower()


@pytest.mark.needs("sklearn")
def test_they_run_without_an_edit(sandbox: Sandbox) -> None:
    driver = sandbox.script("one_after_another.py", ONE_AFTER_ANOTHER)
    done = sandbox.farandole("run", "--horovod", "-n", "2", driver, SCRIPTS, json.dumps(RUNS))
    assert done.returncode == 0, done.stderr
    mnist, adasum, benchmark, elastic = (left_by(sandbox, number) for number in range(len(RUNS)))
    for ranks in (mnist, adasum, benchmark, elastic):
        assert ranks[0] == ranks[1], "the ranks hold other weights"
        assert ranks[0]["size"] == 2
    assert elastic[0]["epoch"] == 3

    learnt = [float(percent) for percent in re.findall(r"test: .*accuracy ([\d.]+)%", done.stdout)]
    assert learnt[-2] > 85 > 50 > learnt[0]
    assert mnist[0]["digest"] != adasum[0]["digest"]
    seen = re.findall(r"Epoch (\d), (\d) workers: accuracy ([\d.]+)%", done.stdout)
    assert [(epoch, workers) for epoch, workers, _ in seen] == [("0", "2"), ("1", "2"), ("2", "2")]
    assert float(seen[-1][2]) > 80

    (each,) = re.findall(r"Img/sec per CPU: ([\d.]+) \+- [\d.]+", done.stdout)
    (total,) = re.findall(r"Total img/sec on 2 CPU\(s\): ([\d.]+) \+- [\d.]+", done.stdout)
    assert float(total) == pytest.approx(2 * float(each), rel=0.01)
    assert float(each) > 0


def left_by(sandbox: Sandbox, number: int) -> list[dict[str, Any]]:
    """By rank."""
    return [json.loads((sandbox.folder / f"{number}.{rank}.json").read_text()) for rank in range(2)]

"""A worker that was forked is like one that was started afresh, to script and launcher."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from farandole.launch.forks import Forked, ForkError, Forks
from farandole.system.job_processes import IDENTITY, kill_leftovers

pytestmark = pytest.mark.fresh
SCRIPT = Path(__file__).parent / "scripts" / "like_fresh.py"
VARIABLES = {
    **{name: value for name, value in os.environ.items() if name != "FARANDOLE_FORK"},
    "OMP_NUM_THREADS": "3",
    "PYTHONUNBUFFERED": "1",
}
RANDOM = ("random", "torch_seed")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FARANDOLE_FORK", raising=False)
        server = Forks.begin(VARIABLES)
    if server is None:
        pytest.skip("no fork server here: it needs Linux without accelerators")
    assert server.wait()
    yield server
    server.close()
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # this process adopts no orphans any more


class Place:
    """Starts commands in a folder, either way, and reads what they wrote."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self._forks = forks
        self._folder = folder

    def forked(
        self, *arguments: str, shown: Mapping[str, str] | None = None, **variables: str
    ) -> Forked:
        with (
            Path(os.devnull).open("rb") as nothing,
            (self._folder / "out").open("wb") as out,
            (self._folder / "err").open("wb") as err,
        ):
            streams = [file.fileno() for file in (nothing, out, err)]
            command = [sys.executable, *arguments]
            return self._forks.start(command, VARIABLES | variables, streams=streams, shown=shown)

    def ended(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        code = self.forked(*arguments, **variables).wait(120)
        return code, (self._folder / "out").read_text(), (self._folder / "err").read_text()

    def fresh(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        with (
            (self._folder / "out").open("wb") as out,
            (self._folder / "err").open("wb") as err,
        ):
            done = subprocess.run(
                [sys.executable, *arguments],
                env=VARIABLES | variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        text = [(self._folder / name).read_text() for name in ("out", "err")]
        return done.returncode, text[0], text[1]

    def script(self, text: str) -> str:
        (self._folder / "script.py").write_text(text)
        return "script.py"


@pytest.fixture
def place(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(forks, tmp_path)


def seen(end: tuple[int, str, str]) -> dict[str, object]:
    code, out, err = end
    assert code == 0, err
    return json.loads(out.removeprefix("seen "))


@pytest.mark.parametrize("arguments", [(str(SCRIPT), "--epochs", "3"), ("-m", "like_fresh", "x")])
def test_a_script_sees_what_it_would_see_in_a_fresh_process(
    place: Place, tmp_path: Path, arguments: Sequence[str]
) -> None:
    (tmp_path / "like_fresh.py").write_text(SCRIPT.read_text().replace('"spec": __spec__,', ""))
    found = [seen(place.ended(*arguments, RANK="1")) for _ in range(2)]
    expected = seen(place.fresh(*arguments, RANK="1"))
    for name in RANDOM:
        values = [json.dumps(facts.pop(name)) for facts in (*found, expected)]
        assert len(set(values)) == 3, f"each process draws its own: {name}"
    assert found == [expected, expected]
    assert expected["was_there"] == []


def test_it_is_forked_and_not_started_afresh(place: Place) -> None:
    """Else the comparison above would say nothing."""
    script = place.script(
        "import sys\nfinder = type(sys.meta_path[0]).__name__\n"
        "import torch\nprint(finder, sys.modules['torch'].__spec__.loader.__class__.__name__)"
    )
    assert place.ended(script) == (0, "Preloaded SourceFileLoader\n", "")


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('no luck')",
        "import sys\nsys.exit(3)",
        "import sys\nsys.exit('told')",
        "def broken(:\n",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "import sys\nsys.excepthook = lambda *e: print('mine', e[2].tb_lineno)\nraise KeyError",
        "import atexit\natexit.register(print, 'last', flush=True)\nprint('first')",
        "import atexit\natexit.register(print, 'last', flush=True)\nraise KeyboardInterrupt",
    ],
)
def test_it_ends_as_a_fresh_process_does(place: Place, text: str) -> None:
    script = place.script(text)
    assert place.ended(script) == place.fresh(script)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("-c", "print('started afresh')"), {}),  # no script
        (("script.py",), {"OMP_NUM_THREADS": "1"}),  # read when torch is loaded
        (("script.py",), {"OF_MY_OWN": "1"}),  # and who knows who reads this one
    ],
)
def test_what_cannot_be_forked_is_executed(
    place: Place, arguments: Sequence[str], variables: Mapping[str, str]
) -> None:
    place.script(
        "import sys\nif 'Preloaded' not in {type(f).__name__ for f in sys.meta_path}:\n"
        "    print('started afresh')"
    )
    assert place.ended(*arguments, **variables) == (0, "started afresh\n", "")


def test_a_module_of_the_same_name_beside_the_script_is_the_one_that_counts(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "numpy.py").write_text("mine = True\n")
    script = place.script("import numpy\nprint(numpy.mine)")
    assert place.ended(script) == (0, "True\n", "")


SETS = """
import os, sys
os.environ['OMP_NUM_THREADS'] = '1'
os.environ['MKL_DYNAMIC'] = 'TRUE'
{}
import torch
forked = 'Preloaded' in {{type(finder).__name__ for finder in sys.meta_path}}
print(torch.get_num_threads(), 'forked' if forked else 'fresh')
"""


@pytest.mark.parametrize("before", ["", "import rich, json", "os.chdir('/'); import numpy"])
def test_a_script_that_sets_variables_before_it_imports_torch_starts_again(
    place: Place, before: str
) -> None:
    script = place.script(SETS.format(before))
    code, out, err = place.ended(script, RANK="0")
    assert (code, out) == (0, "1 fresh\n")
    assert "the script sets MKL_DYNAMIC, OMP_NUM_THREADS itself" in err


@pytest.mark.parametrize(
    "before",
    [
        "print('said')",
        "os.mkdir('made')",
        "open('made', 'w').close()",
        "sys.stdin.read()",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.create_server(('127.0.0.1', 0))",
    ],
)
def test_not_if_anybody_can_tell_that_it_ran_before(place: Place, before: str) -> None:
    script = place.script(SETS.format(before))
    code, out, err = place.ended(script, RANK="0")
    assert code == 0, err
    assert out.splitlines()[-1] == "1 forked"  # numbers of threads can be set later
    assert "the script sets MKL_DYNAMIC itself, and torch was imported before" in err
    assert "--no-fork" in err


def test_its_launcher_is_its_parent_and_finds_it_and_its_children(place: Place) -> None:
    script = place.script(
        "import os, time\nfrom pathlib import Path\n"
        "if os.fork():\n    Path('ready').touch()\ntime.sleep(600)"
    )
    shown = {IDENTITY: "0123456789abcdef", "RANK": "7"}
    worker = place.forked(script, shown=shown, **shown)
    try:
        while not Path("ready").exists():
            assert worker.poll() is None
        process = psutil.Process(worker.pid)
        assert process.ppid() == os.getpid()
        assert "script.py" in " ".join(process.cmdline())
        (child,) = process.children()
        assert kill_leftovers("0123456789abcdef", 6) == []
        killed = kill_leftovers("0123456789abcdef", 7)
        assert {found.pid for found in killed} == {worker.pid, child.pid}
        assert worker.wait(150) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)


def test_a_server_that_has_ended_says_so(monkeypatch: pytest.MonkeyPatch, forks: Forks) -> None:
    monkeypatch.delenv("FARANDOLE_FORK", raising=False)
    server = Forks.begin(VARIABLES)
    assert server is not None
    os.kill(server._server.pid, signal.SIGKILL)
    assert not server.wait()
    with pytest.raises(ForkError):
        server.start([sys.executable, "train.py"], VARIABLES)
    server.close()
    monkeypatch.setenv("FARANDOLE_FORK", "0")
    assert Forks.begin(VARIABLES) is None

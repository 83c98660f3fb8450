"""What the package shows, what it imports, and who in it may know whom."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import farandole
from tests.house import FLOOR

ROOT = Path(farandole.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Modules that run what they read, and torch's calls that do so underneath.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "torch.save"}


def room_of(path: Path) -> str | None:
    """The first-level package or module of a file; None for the package itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return None if first == "__init__" else first


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax of a file, read once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions and for types alone."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def acquaintances() -> dict[str, set[str]]:
    """Which rooms each room imports."""
    known: dict[str, set[str]] = {}
    for path in FILES:
        room = room_of(path)
        if room is None:
            continue
        inside = (name.split(".") for name in imports(path) if name.startswith("farandole."))
        others = {parts[1] for parts in inside} - {room, "__version__"}
        known.setdefault(room, set()).update(others)
    return known


def test_the_public_names_are_these() -> None:
    assert farandole.__all__ == [
        "AdaComm",
        "AllReduce",
        "CheckpointError",
        "Checkpoints",
        "CommError",
        "Daso",
        "DiLoCo",
        "DivergedError",
        "Downpour",
        "FarandoleError",
        "Federated",
        "Group",
        "Hogwild",
        "InexactError",
        "JoinError",
        "Lagged",
        "LargeBatch",
        "Lars",
        "LaunchError",
        "Layout",
        "Local",
        "ModelMismatchError",
        "PostLocal",
        "Run",
        "Server",
        "StageError",
        "Strategy",
        "TileSource",
        "Topology",
        "Trainer",
        "UserError",
        "current",
        "data",
        "init",
        "server",
    ]


@pytest.mark.parametrize("name", farandole.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(farandole, name)
    assert thing.__name__.removeprefix("farandole.") == name  # `server` is a module
    assert thing.__doc__
    assert name in dir(farandole)


def test_the_names_that_type_checkers_see_are_the_same() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(farandole.__all__)


def test_the_server_is_imported_when_it_is_first_used() -> None:
    program = (
        "import sys, farandole as fd; before = 'zmq' in sys.modules; fd.server.Cluster; "
        "sys.exit(before or 'zmq' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'farandole' has no attribute 'AllReduced'"):
        _ = farandole.AllReduced


@pytest.mark.parametrize("module", ["farandole", "farandole.cli", "farandole.launch.launcher"])
def test_what_should_start_fast_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent).returncode == 0


def test_every_room_is_on_a_floor() -> None:
    assert acquaintances().keys() <= FLOOR.keys()


def test_a_room_imports_lower_ones_only() -> None:
    """Neighbours such as `sync` and `layout` do not know each other: `train` is where they meet."""
    upwards = [
        f"{room} imports {other}"
        for room, others in acquaintances().items()
        for other in others
        if FLOOR[other] >= FLOOR[room]
    ]
    assert upwards == []


def test_no_two_files_import_each_other_in_a_circle() -> None:
    """Not through others either, nor inside functions, nor for types alone."""
    names = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    graph = {
        name: {other for other in imports(path) if other in names and other != name}
        for name, path in names.items()
    }
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_no_folder_is_too_full_to_be_overseen() -> None:
    folders = Counter(path.parent for path in FILES)
    assert {str(folder): count for folder, count in folders.items() if count > 20} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_arrives_is_run(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)}.isdisjoint(UNSAFE_MODULES)
    called = {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
    assert called.isdisjoint(UNSAFE_CALLS)
    assert not [name for name in called if name.endswith(("_object", "_object_list"))]

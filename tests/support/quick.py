"""python -m tests.support.quick [SINCE]: a minute of tests of what has changed. `make quick`.

What has changed are the files that differ from the commit SINCE (by default, where this branch left
main), with those that git does not know yet. For a module these are the test files that import it,
or whose name it has; where there are none, those of its folder. They run in the order of how near
they are and how long they take, as far as a minute goes; what is left out is listed. A changed test
file runs in any case.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support.order import weight

ROOT = Path(__file__).parents[2]
BUDGET_SECONDS = 90.0  # of two cores
ALWAYS = ("tests/test_project.py",)
PAGES = (".md", ".yml")


def main() -> None:
    since = sys.argv[1] if len(sys.argv) > 1 else _git("merge-base", "HEAD", "main")[0]
    changed = {*_git("diff", "--name-only", since), *_git("ls-files", "-o", "--exclude-standard")}
    chosen = choose(sorted(changed), tests())
    left, kept, spent = [], [], 0.0
    for name in chosen:
        spent += weight(name)
        (kept if spent <= BUDGET_SECONDS or name in changed else left).append(name)
    print(f"{len(changed)} changed files, {len(kept)} test files")
    if left:
        print(f"left to `make test`: {' '.join(left)}")
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", *ALWAYS, *kept], cwd=ROOT).returncode)


def tests() -> dict[str, set[str]]:
    """The test files, each with the library's modules that it imports."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    # They have an environment of their own: `make test-frontends`.
    found = [path for path in found if "frontends" not in path.parts]
    return {str(path.relative_to(ROOT)): _imports(path) for path in found}


def choose(changed: Iterable[str], tests: dict[str, set[str]]) -> list[str]:
    """Of the `tests` those for the `changed` files: the nearest first, then the shortest."""
    distances: dict[str, int] = {}
    for name in changed:
        for file, distance in _near(Path(name), tests).items():
            distances[file] = min(distance, distances.get(file, distance))
    return sorted(distances, key=lambda file: (distances[file], weight(file), file))


def _near(changed: Path, tests: dict[str, set[str]]) -> dict[str, int]:
    if str(changed) in tests:
        return {str(changed): 0}
    if changed.suffix in PAGES:
        return {file: 1 for file in tests if file.startswith("tests/docs/")}
    folder, *_ = changed.parts
    if folder == "tests":  # a script or a helper
        return {file: 1 for file in tests if Path(file).is_relative_to(_tests_beside(changed))}
    if folder != "farandole" or changed.suffix != ".py":
        return {}
    module = ".".join(changed.with_suffix("").parts).removesuffix(".__init__")
    near = {file: 1 for file, imported in tests.items() if module in imported}
    near |= {file: 0 for file in tests if file.endswith(f"/test_{changed.stem}.py")}
    return near or {file: 2 for file in tests if file.startswith(f"{_mirror(changed)}/")}


def _tests_beside(helper: Path) -> Path:
    """The folder of the tests that use it: the first above it that has any."""
    folder = helper.parent
    while folder.parts[1:] and not any((ROOT / folder).glob("test_*.py")):
        folder = folder.parent
    return folder


def _mirror(changed: Path) -> str:
    """The folder of tests that mirrors its own, or the nearest above."""
    folder = Path("tests", *changed.parts[1:-1])
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return str(folder)


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("farandole")}


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


if __name__ == "__main__":
    main()

"""How the package is built, in figures: folders, sizes, cycles, private access, repetition.

Run it on two trees to compare them; nothing is imported, the source is only read.

    python benchmarks/house.py before=../old/farandole after=farandole
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from common import RESULTS, save

RUN = 6  # lines: what is shorter repeats by chance
LIMIT_FILES = 20
OF_TORCH = {"_buffers", "_indices", "_is_view", "_modules", "_parameters", "_values", "_version"}


def modules_of(package: Path) -> dict[str, Path]:
    """Every file of the package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(tree: ast.AST, modules: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Each module that is imported, with the name taken from it; also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole, "") if whole in modules else (node.module, alias.name)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One cycle after another; the last edge of each is cut before the next is looked for."""
    left = {name: set(others) for name, others in graph.items()}
    found = []
    while True:
        try:
            tuple(TopologicalSorter(left).static_order())
        except CycleError as error:
            cycle = error.args[1]
            found.append(cycle)
            left[cycle[1]].discard(cycle[0])
        else:
            return found


def names_defined(tree: ast.AST) -> set[str]:
    """Functions, classes and attributes that a file defines."""
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return defined


def private_accesses(tree: ast.AST, ours: set[str]) -> list[str]:
    """Where a file reaches for what another file of ours keeps to itself: `other._name`, or an
    import of a private name. What torch and Python call so is not `ours`."""
    own = names_defined(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("farandole"):
            names = [alias.name for alias in node.names if is_private(alias.name)]
            found += [f"{node.lineno}: {name}" for name in names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            holder = node.value
            is_itself = isinstance(holder, ast.Name) and holder.id in ("self", "cls")
            if node.attr in ours - own - OF_TORCH and not is_itself:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def repeated_runs(paths: list[Path]) -> int:
    """How many runs of lines stand in another place too, each counted once a repetition."""
    seen: dict[tuple[str, ...], int] = {}
    again = 0
    for path in paths:
        lines = [line.strip() for line in path.read_text().splitlines()]
        lines = [line for line in lines if line and not line.startswith(("#", "from ", "import "))]
        at = 0
        while at + RUN <= len(lines):
            run = tuple(lines[at : at + RUN])
            if sum(map(len, run)) > 20 * RUN and run in seen:
                again += 1
                at += RUN
                continue
            seen[run] = at
            at += 1
    return again


def comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def figures(package: Path) -> dict[str, Any]:
    modules = modules_of(package)
    folders: Counter[str] = Counter()
    graph: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, int] = {}
    classes: dict[str, int] = {}
    functions: dict[str, int] = {}
    private: list[str] = []
    comments = 0
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    ours = set().union(*(names_defined(tree) for tree in trees.values()))
    for name, path in modules.items():
        text = path.read_text()
        tree = trees[name]
        folders[str(path.parent.relative_to(package.parent))] += 1
        lines[name] = len(text.splitlines())
        comments += comment_lines(text)
        private += [f"{path}:{each}" for each in private_accesses(tree, ours)]
        graph[name] = {other for other, _ in imports_of(tree, modules) if other in modules} - {name}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                classes[f"{name}.{node.name}"] = len(methods)
            elif isinstance(node, ast.FunctionDef):
                functions[f"{name}.{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    # A package's __init__ hands on names of its own files; it is no file that others know.
    for name in [name for name, path in modules.items() if path.name == "__init__.py"]:
        graph.pop(name)
    known = {name: {other for other in others if other in graph} for name, others in graph.items()}
    return {
        "files": len(modules),
        "lines": sum(lines.values()),
        "folders": len(folders),
        "largest_folder": folders.most_common(1)[0],
        f"folders_above_{LIMIT_FILES}_files": sum(n > LIMIT_FILES for n in folders.values()),
        "largest_files": Counter(lines).most_common(5),
        "files_above_350_lines": sum(n > 350 for n in lines.values()),
        "largest_classes_by_methods": Counter(classes).most_common(5),
        "longest_functions": Counter(functions).most_common(5),
        "cycles": len(found := cycles(known)),
        "circles": [" > ".join(cycle) for cycle in found],
        "private_access_across_files": len(private),
        "private": private,
        f"repeated_runs_of_{RUN}_lines": repeated_runs(list(modules.values())),
        "comment_share": round(comments / sum(lines.values()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="of the package")
    parser.add_argument("--list", action="store_true", help="name each cycle and private access")
    parser.add_argument("--save", default="house", metavar="NAME", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")
    args = parser.parse_args()
    found = {}
    for tree in args.trees:
        name, _, folder = tree.partition("=")
        found[name] = figures(Path(folder).resolve())
    for each in found.values():
        named = [*each.pop("circles"), *each.pop("private")]
        if args.list:
            print(*named, sep="\n")
    for key in next(iter(found.values())):
        print(f"{key:32}", " | ".join(f"{name}: {each[key]}" for name, each in found.items()))
    save(args.save, found, args.out)


if __name__ == "__main__":
    main()

"""Figures of the structure, so that growth is seen: `make count`.

Lines and modules by room, numeric constants, modules with one importer, circles of files, imports that run up.

- It reads the files only. Lines are those of the files as they are formatted; `__init__.py` counts where it has a line.
- An import counts wherever it stands, in functions and for types alone too.
- A constant is a name in a module or a class, or a default of a dataclass, whose value has a number. Names that one
  statement sets together count each. A default of 0, where a count or a time begins, is none.
- An import runs up where its room is not among those that the room may import (`tests/test_package.py`).
"""

from __future__ import annotations

import ast
import runpy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rest_local"
PLANNER = ("planning", "drafting", "calibration")


def files_of(folder: str) -> dict[str, Path]:
    """Return every file of Python with a line in it, by the name of its module."""
    paths = (path for path in sorted((ROOT / folder).rglob("*.py")) if path.stat().st_size)
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def lines_of(paths: Mapping[str, Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths.values())


def room_of(module: str) -> str:
    """Return the folder of a module below the package, or an empty string for modules that belong to all."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / PACKAGE / parts[1]).is_dir() else ""


def imports_of(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules among `known` that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{name.name}" for name in node.names} & known.keys()
            found |= inside or {node.module}
    return found & known.keys()


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of files that import each other, also by way of others (Tarjan's components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(imports):
        if name not in number:
            visit(name)
    return [group for group in found if len(group) > 1]


def constants_of(path: Path) -> Iterator[str]:
    """Yield the names of numeric constants."""
    tree = ast.parse(path.read_text("utf-8"))
    for body in (tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        for node in body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            numbers = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            numbers = [each for each in numbers if isinstance(each, int | float) and not isinstance(each, bool)]
            is_start = (
                isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant) and node.value.value == 0
            )
            if numbers and not is_start:
                for target in targets:
                    yield from (each.id for each in getattr(target, "elts", [target]) if isinstance(each, ast.Name))


def main() -> None:
    files = files_of(PACKAGE)
    imports = {name: imports_of(path, files) - {name} for name, path in files.items()}
    rooms: defaultdict[str, dict[str, Path]] = defaultdict(dict)
    for name, path in files.items():
        rooms[room_of(name)][name] = path
    print(f"{'lines':>8}{'modules':>9}")
    for room, own in sorted(rooms.items(), key=lambda pair: -lines_of(pair[1])):
        print(f"{lines_of(own):8}{len(own):9}  {PACKAGE}/{room}")
    for folder in (PACKAGE, "tests", "benchmarks", "models", "scripts"):
        print(f"{lines_of(files_of(folder)):8}{len(files_of(folder)):9}  {folder}")
    constants = [name for room in PLANNER for path in rooms[room].values() for name in constants_of(path)]
    print(f"{len(constants)} numeric constants in {', '.join(PLANNER)}")
    importers = Counter(name for names in imports.values() for name in names)
    print(f"{sum(n == 1 for n in importers.values())} modules with one importer")
    below: dict[str, set[str]] = runpy.run_path(str(ROOT / "tests/test_package.py"))["BELOW"]
    pairs = [(name, other) for name, others in imports.items() for other in sorted(others)]
    up = [(a, b) for a, b in pairs if room_of(b) not in (below.get(room_of(a), {room_of(b)}) | {"", room_of(a)})]
    print(f"{len(up)} imports run up", *(f"  {a} -> {b}" for a, b in up), sep="\n")
    groups = circles({name: names - {PACKAGE} for name, names in imports.items()})
    print(f"{len(groups)} circles of files", *(f"  {', '.join(group)}" for group in groups), sep="\n")


if __name__ == "__main__":
    main()

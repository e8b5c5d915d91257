"""The order of the modules, and the collector's lightness."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainarchive

PACKAGE = Path(trainarchive.__file__).parent

ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "urls", "settings", "run", "frame", "places"),
    ("notice", "private", "processes", "sources", "opening", "tail", "spool", "holder"),
    ("stream", "embedded"),
    ("collector",),
    ("keys", "segment", "store"),
    (
        *("hosts", "states", "manifest", "coverage", "shelf", "contents", "generations", "nodes"),
        *("sealing", "lease", "finishing", "sweeping", "reaping"),
    ),
    ("reading", "fetching"),
    ("cli", "demo", "__main__"),
)
"""A module imports only from its own row (without a cycle) and from the rows above it."""

NODE_ROWS = 4
"""A compute node loads nothing below these rows."""

HEAVY = ("boto3", "botocore", "celery", "kombu", "polars", "rich", "trainarchive.store", "trainarchive.segment")


def test_every_module_has_its_row() -> None:
    """No module stands outside the order."""
    there = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if _is_module(path)}
    assert there == {name for row in ROWS for name in row}


def test_modules_import_only_upwards() -> None:
    """An import from a lower row would make the parts depend on each other."""
    row_of = {name: number for number, row in enumerate(ROWS) for name in row}
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {target}"
        for path in PACKAGE.rglob("*.py")
        for target in _imports(path)
        if (own := path.relative_to(PACKAGE).parts[0].removesuffix(".py")) != target
        and own != "__init__"
        and row_of[target] > row_of[own]
    ]
    assert not wrong


def test_no_cycles() -> None:
    """Within a row, too, there is an order."""
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        graph.setdefault(own, set()).update(target for target in _imports(path) if target != own)
    while graph:
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert free, f"a cycle among {sorted(graph)}"
        for name in free:
            del graph[name]


@pytest.mark.parametrize("verb", ["trainarchive.cli.collector", "trainarchive.collector"])
def test_the_collector_is_light(verb: str) -> None:
    """A compute node's daemon must not carry the workers' libraries."""
    code = f"import sys, {verb}; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded for heavy in HEAVY if name == heavy or name.startswith(heavy + ".")]


def _is_module(path: Path) -> bool:
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()


def _imports(path: Path) -> set[str]:
    """Top-level modules of the package that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "trainarchive":
            names = [f"trainarchive.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("trainarchive.")}
    return found - {"__version__"}

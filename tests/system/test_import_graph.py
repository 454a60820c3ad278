"""Who may import whom: packages stand in one order, low to high, and each imports only what stands below it.

Read from the source, not from a running program: imports inside functions count like any other. Imports for a type
checker alone do not run and do not count.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pbmvfl

SOURCE = Path(pbmvfl.__file__).parent

#: Low to high. `pbmvfl` is the package's own `__init__`, whose other names are loaded by need and not by import.
ORDER = [
    "errors",
    "pbmvfl",
    "reference",
    "_compiled",
    "_text",
    "_descriptors",
    "_files",
    "_settings",
    "crypto",
    "wire",
    "privacy",
    "mechanisms",
    "plan",
    "data",
    "training",
    "protocol",
    "ledger",
    "federation",
    "attacks",
    "audit",
    "deploy",
    "report",
    "research",
    "cli",
    "__main__",
]


#: Each module is read by several tests.
parsed = functools.cache(ast.parse)


def module_name(path: Path) -> str:
    parts = ("pbmvfl", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def that_runs(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a tree but those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and for_type_checkers(child):
            for other in child.orelse:
                yield other
                yield from that_runs(other)
        else:
            yield child
            yield from that_runs(child)


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that a module imports, in whatever form and wherever."""
    found: set[str] = set()
    for node in that_runs(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would slip through these tests"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return {name for name in found if name.split(".")[0] == "pbmvfl"}


def part(module: str) -> str:
    """The package or module right below `pbmvfl` that a module belongs to."""
    return module.split(".")[1] if "." in module else "pbmvfl"


def parts_imported(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which parts each part imports, from the modules' text."""
    graph: dict[str, set[str]] = {part(module): set() for module in sources}
    for module, text in sources.items():
        graph[part(module)] |= {part(name) for name in imports(parsed(text), set(sources))} - {part(module)}
    return graph


SOURCES = {module: path.read_text() for module, path in MODULES.items()}


@functools.cache
def graph() -> dict[str, set[str]]:
    """Made by the first test that asks: every process of a test run imports this file, and one runs it."""
    return parts_imported(SOURCES)


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_parts_import_each_other_on_whatever_detour() -> None:
    assert len(MODULES) > 80
    assert cycle_of(graph()) == []


def test_the_declared_order_names_every_part_once() -> None:
    assert sorted(ORDER) == sorted(graph())


@pytest.mark.parametrize("name", ORDER)
def test_a_part_imports_only_what_stands_below_it(name: str) -> None:
    above = ORDER[ORDER.index(name) :]
    assert not graph()[name].intersection(above)


def test_the_account_imports_nothing_but_errors_settings_and_words() -> None:
    assert graph()["privacy"] <= {"errors", "_settings", "_text"}


def test_a_plan_is_only_a_type_to_the_wire_and_to_the_planner() -> None:
    for module in ("pbmvfl.wire.traffic", "pbmvfl.plan.search", "pbmvfl.plan.checks"):
        assert "pbmvfl.plan.plan" not in imports(parsed(SOURCES[module]), set(MODULES))
        assert "from pbmvfl.plan.plan import Plan" in SOURCES[module]


def test_only_its_own_folder_imports_nvflare() -> None:
    """The line, policies and alignment are tested, and could be run, without it."""
    importers = {module for module, text in SOURCES.items() if "nvflare" in foreign(parsed(text))}
    assert importers, "the folder that may import it does"
    assert {module for module in importers if not module.startswith("pbmvfl.deploy.nvflare.")} == set()


def test_of_a_deployment_only_the_command_line_imports_what_needs_nvflare() -> None:
    """Nothing of the library drags it in by way of the folder that may."""
    known = set(MODULES)
    for module, text in SOURCES.items():
        if part(module) in ("deploy", "cli") and not module.startswith("pbmvfl.deploy.nvflare"):
            found = {name for name in imports(parsed(text), known) if name.startswith("pbmvfl.deploy.nvflare")}
            assert not found or part(module) == "cli", f"{module} imports {', '.join(sorted(found))}"


def foreign(tree: ast.Module) -> set[str]:
    """Packages that a module imports, by their first names, also inside functions and for a type checker."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


# --- names that begin with an underscore ---


def reached_into(text: str) -> list[str]:
    """Private names of other modules of the package that a module takes: `from x import _y`, or `x._y`."""
    tree = parsed(text)
    found = []
    modules: set[str] = set()
    for node in ast.walk(tree):  # a type checker's imports too
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "pbmvfl":
            found += [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            own = [alias for alias in node.names if alias.name.split(".")[0] == "pbmvfl"]
            modules |= {alias.asname or "pbmvfl" for alias in own}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            first = ast.unparse(node.value).split(".")[0]
            if first in modules:
                found.append(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reaches_into_another_s_private_names(module: str) -> None:
    assert reached_into(SOURCES[module]) == []


# --- what a machine with torch and numpy alone can import ---


def test_the_simulation_imports_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    """Everything else that is installed is hidden: the standard library and what torch and numpy require are left."""
    modules = sorted(module for module in MODULES if module.startswith("pbmvfl.research.simulation"))
    program = f"""
import importlib, sys
import numpy, torch
allowed = {{name.partition(".")[0] for name in sys.modules}} | set(sys.stdlib_module_names) | {{"pbmvfl", "filelock"}}
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not any(
            frame.startswith(("torch", "numpy")) for frame in importers()
        ):
            raise ImportError(name + " is hidden")
def importers():
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return [name for name in found if not name.startswith(("importlib", "__main__"))]
sys.meta_path.insert(0, Hidden())
for module in {modules!r}:
    importlib.import_module(module)
print(sorted({{"numba", "cryptography", "sklearn", "scipy", "pyarrow", "safetensors", "rich"}} & set(sys.modules)))
try:
    import scipy
except ImportError:
    print("scipy is hidden")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "scipy is hidden"]
    assert len(modules) >= 5


# --- the listing of the root ---

ROOT_MODULES = ["_compiled.py", "_descriptors.py", "_files.py", "_settings.py", "_text.py", "errors.py", "reference.py"]
ROOT_PACKAGES = [
    "attacks",
    "audit",
    "cli",
    "crypto",
    "data",
    "deploy",
    "federation",
    "ledger",
    "mechanisms",
    "plan",
    "privacy",
    "protocol",
    "report",
    "research",
    "training",
    "wire",
]


def test_the_root_holds_these_modules_and_packages_and_nothing_else() -> None:
    found = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert found == {"__init__.py", "__main__.py", "py.typed", *ROOT_MODULES, *ROOT_PACKAGES}


# --- that these tests would notice ---


def test_a_cycle_is_noticed_also_inside_functions_and_not_for_type_checkers() -> None:
    low = "def late():\n    from pbmvfl.high.top import thing\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pbmvfl.high import top\n"
    high = {"pbmvfl.high": "", "pbmvfl.high.top": "import pbmvfl.low\n"}
    assert set(cycle_of(parts_imported({"pbmvfl.low": low, **high}))) == {"low", "high"}
    assert cycle_of(parts_imported({"pbmvfl.low": typed, **high})) == []
    other = typed + "else:\n    from pbmvfl.high import top\n"
    assert set(cycle_of(parts_imported({"pbmvfl.low": other, **high}))) == {"low", "high"}


def test_packages_of_others_are_noticed_in_every_form() -> None:
    text = "import a.b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import c as d\n"
    assert foreign(ast.parse(text + "def late():\n    from e.f import g\n")) == {"a", "typing", "c", "e"}


def test_private_names_are_noticed_in_every_form() -> None:
    text = """
import pbmvfl.wire.messages
from pbmvfl.crypto import key_exchange as keys
from pbmvfl.crypto.entropy import _generation, __doc__
def late():
    from pbmvfl.privacy import renyi as curves
    return curves._divergences, keys._statement, pbmvfl.wire.messages._HEADER, keys.__name__, torch._foreach_add_
"""
    assert sorted(reached_into(text)) == [
        "curves._divergences",
        "keys._statement",
        "pbmvfl.crypto.entropy._generation",
        "pbmvfl.wire.messages._HEADER",
    ]

"""The public names, and who may import what."""

from __future__ import annotations

import ast
import functools
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pbmvfl
import pbmvfl.privacy
from pbmvfl import errors
from pbmvfl.errors import PlanError

SOURCE = Path(pbmvfl.__file__).parent
PRIVACY = sorted(f"pbmvfl.privacy.{module.name}" for module in pkgutil.iter_modules(pbmvfl.privacy.__path__))


def python(code: str, cwd: Path, timeout: float = 900) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module that a file imports anywhere in it, and every name that it takes from one."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports would slip through these tests"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in ("import_module", "__import__"):
                yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def concerns(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


# --- names ---


def test_the_exported_names_are_exactly_these():
    assert sorted(pbmvfl.__all__) == [
        "FederatedModel",
        "Federation",
        "Ledger",
        "Limit",
        "PbmvflError",
        "Plan",
        "Policy",
        "Predictions",
        "ReleaseOptions",
        "Result",
        "VerticalClassifier",
        "VerticalDataset",
        "load",
        "load_dataset",
        "load_table",
    ]


def test_every_error_of_the_errors_module_is_drawn_in_its_tree():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert len(kinds) > 20
    assert all(issubclass(kind, pbmvfl.PbmvflError) for kind in kinds)
    tree = errors.__doc__ or ""
    assert [kind.__name__ for kind in kinds if not re.search(rf"[ ─]{kind.__name__}\b", tree)] == []


@pytest.mark.parametrize("name", pbmvfl.__all__)
def test_every_exported_name_resolves_to_what_it_is_called(name):
    assert getattr(pbmvfl, name).__name__ == name
    assert name in dir(pbmvfl)


def test_the_data_module_is_there_after_importing_the_package_alone_and_brings_no_torch(tmp_path):
    code = "import sys, pbmvfl; print(pbmvfl.data.load_table is pbmvfl.load_table, 'torch' in sys.modules)"
    assert python(code, tmp_path).split() == ["True", "False"]
    assert "data" in dir(pbmvfl)


def test_the_package_runs_as_a_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pbmvfl", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"pbmvfl {pbmvfl.__version__}\n"


def test_a_star_import_brings_the_exported_names_and_no_others(tmp_path):
    code = "before = set(dir()); from pbmvfl import *; print(sorted(set(dir()) - before - {'before'}))"
    assert ast.literal_eval(python(code, tmp_path)) == sorted(pbmvfl.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'federation_of_everything'"):
        _ = pbmvfl.federation_of_everything


#: A program as a user writes it. A line that a type checker must refuse says why.
USER_PROGRAM = """
from pathlib import Path

import pbmvfl
from pbmvfl.federation.federation import Parties
from pbmvfl.mechanisms import PoissonBinomial
from pbmvfl.plan.groups import Learning, OptimizerName, Sizes
from pbmvfl.privacy.table import PrivacyTable
from pbmvfl.privacy.units import Accounting, Adversary, Unit

data = pbmvfl.load_dataset("digits")
plan = pbmvfl.Plan.for_data(data, num_trials=16, beta=0.25)
plan = pbmvfl.Plan.of(num_parties=3, num_samples=9, num_classes=2, mechanism="pbm", optimizer=OptimizerName.ADAM)
mechanism: str = plan.mechanism
sizes = Sizes(num_parties=3, num_samples=9, num_classes=2)
plan = pbmvfl.Plan(sizes=sizes, release=PoissonBinomial(num_parties=3, num_trials=16, beta=0.25), seed=1)
rows: int = plan.num_samples
table: PrivacyTable = plan.privacy(adversaries=[Adversary(colluding_parties=1)])
epsilon: float = table.epsilon("cell", Accounting.PAPER, colluding_parties=1)
result: pbmvfl.Result = pbmvfl.Federation(plan, parties=Parties.PROCESSES).fit(data)
limit = pbmvfl.Limit.choose(unit=Unit.CELL, accounting="paper", epsilon=8, delta=1e-5)
pbmvfl.Ledger(Path("party.sqlite")).set_limit("digits", limit)
plan = plan.replace(beta=0.1, evaluation="none")
plan = pbmvfl.Plan.for_budget(epsilon=8, data=data, vote="margin", first_weights=["0" * 64])
pbmvfl.Federatoin(plan)  # attr-defined
pbmvfl.Plan.of(num_parties=3, num_samples=9, num_classes=2, optimiser="adam")  # call-arg
pbmvfl.Plan.for_data(data, num_trials="many")  # arg-type
pbmvfl.Plan.for_budget(epsilon=8, data=data, num_epoch=3)  # call-arg
plan.replace(secure_aggregation="yes")  # arg-type
pbmvfl.Plan(sizes=sizes, release="pbm")  # arg-type
pbmvfl.Plan(sizes=sizes, release=PoissonBinomial(num_parties=3, betta=0.1))  # call-arg
Learning(learning_rate="fast")  # arg-type
text: str = plan.num_samples  # assignment
"""


def test_a_users_program_is_checked_name_by_name(tmp_path):
    pytest.importorskip("mypy")
    program, packages = tmp_path / "program.py", tmp_path / "packages"
    program.write_text(USER_PROGRAM)
    packages.mkdir()
    (packages / "pbmvfl").symlink_to(SOURCE)  # alone: without the types of numpy and torch it takes three seconds
    options = [
        "--strict",
        "--config-file=",
        "--no-site-packages",
        "--ignore-missing-imports",
        "--follow-imports=silent",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program.name],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = re.findall(r"^program\.py:(\d+): error: .*\[(.*)\]$", done.stdout, flags=re.MULTILINE)
    lines = enumerate(USER_PROGRAM.splitlines(), start=1)
    assert found == [(str(number), line.split("  # ")[1]) for number, line in lines if "  # " in line], done.stdout


def test_a_checker_sees_every_name_that_is_loaded_when_first_used():
    seen = {
        alias.name: node.module
        for block in parsed(SOURCE / "__init__.py").body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == pbmvfl._LAZY


def test_importing_the_package_loads_no_array_library(tmp_path):
    code = "import sys, pbmvfl; print(sorted({'numpy', 'torch', 'scipy', 'pyarrow'} & set(sys.modules)))"
    assert python(code, tmp_path).strip() == "[]"


# --- refusals ---


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"unit": "row"}, "unit='row' is not one of cell, record, party"),
        ({"accounting": "loose"}, "accounting='loose' is not one of paper, strict"),
        ({"colluding_parties": 1}, "no row for server + 1 party; it has server, 1 party, server + 2 parties"),
        ({"server": False}, "nobody"),
    ],
)
def test_a_question_that_the_table_cannot_answer_is_refused_with_what_it_can(question, words):
    table = pbmvfl.Plan.of(num_parties=3, num_samples=10, num_classes=2).privacy()
    with pytest.raises(PlanError, match=re.escape(words)):
        table.epsilon(**{"unit": "cell", "accounting": "paper", **question})


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert pbmvfl.__version__ == version("pbmvfl")


# --- who imports what ---


def test_planning_and_accounting_load_neither_torch_nor_numba(tmp_path):
    code = f"""
import importlib, sys
import pbmvfl, pbmvfl.plan.plan
for module in {PRIVACY!r}:
    importlib.import_module(module)
plan = pbmvfl.Plan.of(num_parties=3, num_samples=10, num_classes=2)
plan.privacy()
print(sorted(name for name in ("torch", "numba", "sklearn") if name in sys.modules))
"""
    assert len(PRIVACY) >= 5
    assert python(code, tmp_path).strip() == "[]"


def test_the_check_of_loaded_modules_would_notice_torch(tmp_path):
    assert python("import sys, pbmvfl; pbmvfl.Federation; print('torch' in sys.modules)", tmp_path).strip() == "True"


FORBIDDEN_IN_PRIVACY = (
    "torch",
    "numba",
    *(f"pbmvfl.{name}" for name in ("training", "protocol", "federation", "deploy", "research")),
    "pbmvfl.cli",
)


@pytest.mark.parametrize("path", sorted((SOURCE / "privacy").glob("*.py")), ids=lambda path: path.stem)
def test_the_account_imports_nothing_that_trains(path):
    names = set(imported(path))
    assert not [name for name in names for module in FORBIDDEN_IN_PRIVACY if concerns(name, module)]


def test_the_reader_of_imports_sees_them_wherever_they_are(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import torch.nn as n\n"
        "from pbmvfl.protocol import party\n"
        "def late():\n    from pbmvfl.protocol.server import Server\n"
        "from importlib import import_module\nimport_module('pickle')\n"
    )
    assert {
        "torch.nn",
        "pbmvfl.protocol.party",
        "pbmvfl.protocol.server",
        "pbmvfl.protocol.server.Server",
        "pickle",
    } <= set(imported(path))


MODULES = sorted(SOURCE.rglob("*.py"))


def test_no_module_reads_or_writes_pickles():
    assert len(MODULES) > 30
    for path in MODULES:
        found = [
            name
            for name in imported(path)
            for module in ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
            if concerns(name, module)
        ]
        assert not found, path


def test_no_module_loads_a_file_in_a_way_that_unpickles():
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "torch.save"), path
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle":
                    assert ast.unparse(keyword.value) == "False", path


SHOWS = ("cli", "report", "research")
#: Who may all the same, and why.
MAY_SHOW = {
    "__main__.py": {"cli"},  # `python -m pbmvfl` is the command line
}


def test_commands_and_reports_are_never_imported_by_what_they_show():
    shown = [path for path in MODULES if path.relative_to(SOURCE).parts[0] not in SHOWS]
    assert len(shown) > 30
    for path in shown:
        found = {package for package in SHOWS for name in imported(path) if concerns(name, f"pbmvfl.{package}")}
        assert found <= MAY_SHOW.get(str(path.relative_to(SOURCE)), set()), path


def test_pictures_import_no_command_and_no_study():
    for path in sorted((SOURCE / "report").glob("*.py")):
        assert not [n for n in imported(path) for p in ("cli", "research") if concerns(n, f"pbmvfl.{p}")], path

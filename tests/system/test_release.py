"""What a release promises: one version everywhere, workflows that a runner can read, and the README's addresses."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import pbmvfl

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# --- the version ---


def test_the_version_is_the_same_everywhere():
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest is not None
    assert PROJECT["version"] == pbmvfl.__version__ == newest[1] == citation["version"]
    assert str(citation["date-released"]) == newest[2]
    assert "unreleased" not in (ROOT / "CHANGELOG.md").read_text().lower()


def test_every_dependency_has_a_pin_and_a_tested_python_a_classifier():
    pins = {
        line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()
    }
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[<>=!~\[ ]", each)[0].lower().replace("_", "-") for each in wanted} - {"pbmvfl"}
    assert names <= pins
    tested = {str(version) for path in WORKFLOWS for version in pythons(yaml.safe_load(path.read_text()))}
    assert {f"Programming Language :: Python :: {version}" for version in tested} <= set(PROJECT["classifiers"])


def pythons(workflow: dict[Any, Any]) -> list[str]:
    return [version for job in workflow["jobs"].values() for version in matrix_of(job).get("python", [])]


# --- workflows ---


def matrix_of(job: dict[str, Any]) -> dict[str, Any]:
    return job.get("strategy", {}).get("matrix", {})


def troubles(text: str) -> list[str]:
    """What a runner would refuse in a workflow, as far as its own text and this repository tell."""
    workflow = yaml.safe_load(text)
    found = [
        f"no {name!r}" for name in ("name", True, "permissions", "jobs") if name not in workflow
    ]  # YAML: on is True
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = workflow.get("jobs", {})
    for name, job in jobs.items():
        found += [f"{name}: no {field}" for field in ("runs-on", "timeout-minutes", "steps") if field not in job]
        needed = job.get("needs", [])
        found += [
            f"{name}: needs {each}" for each in ([needed] if isinstance(needed, str) else needed) if each not in jobs
        ]
        for expression in re.findall(r"\$\{\{(.*?)\}\}", yaml.safe_dump(job)):
            context, _, field = expression.strip().partition(".")
            if context not in ("matrix", "github", "env", "secrets", "runner", "steps", "needs"):
                found.append(f"{name}: unknown context {context}")
            elif context == "matrix" and field not in matrix_of(job):
                found.append(f"{name}: matrix.{field} is not declared")
        for step in job.get("steps", []):
            if ("uses" in step) == ("run" in step):
                found.append(f"{name}: a step has either uses or run")
            if "uses" in step and not re.fullmatch(r"[\w.-]+/[\w./-]+@v?[\w.]+", step["uses"]):
                found.append(f"{name}: {step['uses']} has no version")
            command = step.get("run", "")
            found += [
                f"{name}: no target {each}" for each in re.findall(r"\bmake ([a-z-]+)", command) if each not in targets
            ]
            paths = re.findall(r"\b(?:tests|examples|benchmarks)/[\w./-]+", command)
            found += [f"{name}: no file {each}" for each in paths if not (ROOT / each).exists()]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_runner_can_read_the_workflow(path):
    assert troubles(path.read_text()) == []


def test_linux_macos_and_windows_are_tested():
    systems = set()
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            systems |= set(matrix_of(job).get("os", [job["runs-on"]]))
    assert {"ubuntu-latest", "macos-latest", "windows-latest"} <= systems


BROKEN = {
    "timeout-minutes: 20": "timeout: 20",
    "runs-on: ${{ matrix.os }}": "runs-on: ${{ matrix.system }}",
    "run: make lint": "run: make lnt",
    "actions/checkout@v4": "actions/checkout",
    "tests/privacy": "tests/privcy",
    "permissions:": "permission:",
}


@pytest.mark.parametrize(("right", "wrong"), BROKEN.items(), ids=BROKEN)
def test_a_broken_workflow_is_noticed(right, wrong):
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert right in text
    assert troubles(text.replace(right, wrong))


# --- the distributions' check ---


def test_the_check_of_a_release_finds_addresses_that_work_only_inside_the_repository():
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".ci" / "check_release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "[a](docs/a.md) ![b](b.png) [c](https://example.org) [d](#d)\n\n| x |\n|---|\n| [e](e.md) |\n"
    assert module.relative_addresses(text) == ["docs/a.md", "b.png", "e.md"]

"""The documentation site: built strictly, complete, and without anything that is loaded from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import pbmvfl
from pbmvfl.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="the docs are not beside these tests")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a process of its own: other tests add mechanisms and commands, which are in no docs."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_exported_name_is_on_the_page_of_the_api(site):
    page = (site / "reference" / "api" / "index.html").read_text()
    missing = [
        name
        for name in pbmvfl.__all__
        if not re.search(rf'id="pbmvfl\.[\w.]*\b{getattr(pbmvfl, name).__name__}"', page)
    ]
    assert missing == []


@pytest.mark.slow
def test_every_command_is_on_the_page_of_the_command_line(site):
    page = (site / "reference" / "cli" / "index.html").read_text()

    def names(command, name):
        yield name
        for child, inner in getattr(command, "commands", {}).items():
            yield from names(inner, f"{name}-{child}")

    commands = set(names(typer.main.get_command(app), "pbmvfl"))
    assert len(commands) > 20
    assert {name for name in commands if f'id="{name}"' not in page} == set()


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site):
    """Links may lead elsewhere; scripts, styles, fonts and pictures may not."""
    loaded = re.compile(
        r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"|<link[^>]*rel="(?:stylesheet|icon|preconnect)"[^>]*>'
    )
    for page in site.rglob("*.html"):
        for match in loaded.finditer(page.read_text()):
            assert "//" not in match[0].replace("https://pbmvfl.github.io", ""), (page, match[0])
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text()), style


def test_lines_are_at_most_120_characters():
    """Of prose: a row of a table, a link's address and an output that is shown cannot be broken."""
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
        assert long == [], page


def test_every_exported_name_has_a_docstring():
    assert [name for name in pbmvfl.__all__ if not (getattr(pbmvfl, name).__doc__ or "").strip()] == []

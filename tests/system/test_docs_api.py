"""docs/reference/api.md is made from docstrings and signatures, and is what they say now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pbmvfl

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(not (DOCS / "make_api.py").exists(), reason="the docs are not beside these tests")


def test_the_page_is_up_to_date():
    """In a process of its own: other tests add mechanisms and kinds of rounds, which are in no docs."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "make_api.py"), "--check"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, (
        done.stderr or "docs/reference/api.md is stale: run `python docs/make_api.py` and commit the page"
    )


def test_every_exported_name_is_on_the_page():
    page = (DOCS / "reference" / "api.md").read_text()
    missing = [name for name in pbmvfl.__all__ if not re.search(rf"(### |[├└│ ─]|^){name}\b", page, flags=re.MULTILINE)]
    assert not missing, f"{missing}: run `python docs/make_api.py`, which tells where they belong"


def test_every_exported_name_says_what_it_is():
    unsaid = [name for name in pbmvfl.__all__ if not (getattr(pbmvfl, name).__doc__ or "").strip()]
    assert unsaid == []

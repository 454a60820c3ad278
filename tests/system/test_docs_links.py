"""Every link of the README and of the docs leads to a file, and to a heading if it names one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the docs are not beside these tests")


def links(text: str) -> list[str]:
    """Those to files: no addresses, nothing inside of code."""
    found = (first or second for first, second in _LINK.findall(_CODE.sub("", text)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """What headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert broken(page) == []


# --- the README is shown on a package index too, so its links are absolute ---


def target_of(address: str) -> Path | None:
    """The file that an address of the site or of the repository stands for; None for an address elsewhere."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if address.startswith(site := urls["Documentation"]):
        name = address.removeprefix(site).partition("#")[0].strip("/")
        return ROOT / "docs" / (name if Path(name).suffix else f"{name or 'index'}.md")
    if address.startswith(source := f"{urls['Source']}/blob/main/"):
        return ROOT / address.removeprefix(source)
    return None


def test_links_of_the_readme_are_absolute_and_lead_to_files_and_pages():
    text = (ROOT / "README.md").read_text()
    assert links(text) == []
    found = [target_of(each) for each in re.findall(r"https://[^\s)}]+", text)]
    assert len([each for each in found if each]) > 15
    assert [each for each in found if each and not each.is_file()] == []
    assert len([each for each in found if each is None]) == 1, "arXiv alone is elsewhere"


def test_the_readme_has_at_most_700_words():
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_an_address_without_a_page_is_seen():
    site = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    assert target_of(f"{site}/evidence/utility/").is_file()
    assert target_of(f"{site}/images/row.svg").is_file()
    assert not target_of(f"{site}/evidence/none/").is_file()
    assert target_of("https://elsewhere.example/") is None


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, here\n[a](page.md) [b](none.md) [c](#a-heading-here) [d](#none) `[e](code.md)` [f](https://x.y)\n"
    )
    assert broken(page) == ["none.md", "#none"]


def test_every_test_that_a_page_names_exists():
    """Names of three words or more: `test_ids` is a field of a data set."""
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+_\w+)`", page.read_text())}
    defined = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 100
    assert named - defined == set()

"""Check built distributions: one wheel and one source archive of this version, their files, and the README's links.

python .ci/check_release.py FOLDER
"""

from __future__ import annotations

import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]


def relative_addresses(markdown: str) -> list[str]:
    """Return the addresses of links and pictures that work only inside the repository."""
    tokens = [child for token in MarkdownIt().enable("table").parse(markdown) for child in token.children or []]
    found = [str(token.attrs.get(name)) for token in tokens for name in ("href", "src") if name in token.attrs]
    return [address for address in found if not address.startswith(("https://", "#", "mailto:"))]


def check(folder: Path) -> list[str]:
    """Return what is wrong with the distributions in a folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"{project['name']}-{project['version']}"
    wheel, archive = folder / f"{name}-py3-none-any.whl", folder / f"{name}.tar.gz"
    if {path.name for path in folder.iterdir()} != {wheel.name, archive.name}:
        return [f"{folder} must hold {wheel.name} and {archive.name} alone"]
    with zipfile.ZipFile(wheel) as opened:
        files = set(opened.namelist())
        metadata = message_from_string(opened.read(f"{name}.dist-info/METADATA").decode())
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    source = {path for path in source if "__pycache__" not in path}
    with tarfile.open(archive) as opened_archive:
        packed = {member.partition("/")[2] for member in opened_archive.getnames()}
    troubles = [f"the wheel lacks {path}" for path in sorted(source - files)]
    troubles += [f"the wheel has {path}" for path in sorted(files - source) if ".dist-info/" not in path]
    troubles += [f"the archive lacks src/{path}" for path in sorted(source) if f"src/{path}" not in packed]
    troubles += [
        f"README: {address} works only inside the repository"
        for address in relative_addresses(str(metadata.get_payload()))
    ]
    return troubles


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join(found) or "wheel, source archive and README are as they must be")
    sys.exit(1 if found else 0)

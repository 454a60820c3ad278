"""Where a simulation's parties keep their ledgers."""

from __future__ import annotations

from pathlib import Path


def ledger_of(folder: Path, index: int, party: str) -> Path:
    """A party's book in the folder of all of them."""
    del party
    return folder / f"party-{index}.sqlite"

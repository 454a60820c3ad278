"""What a model's parties ask of their ledgers before rows are predicted, beside the charge itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.books import book_of
from pbmvfl.ledger.file import is_begun
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.model.parts import PartyPart
from pbmvfl.party_setup import PartySetup


def look_exactly(parts: Sequence[PartyPart], books: Path | None, dataset: str, *, permitted: bool) -> None:
    """Exact sums are outside every limit: an owner who set one is asked, and what he says is noted.

    Where training was charged, the books that know of it are the ones to ask: without them nobody knows of a limit.
    """
    for part in parts:
        path = None if books is None else book_of(books, part.index, part.party, dataset=dataset)
        if not permitted and part.ledger_run and not (path is not None and _knows(path, part)):
            raise LedgerError(
                f"exact sums: training of party={part.party!r} was charged to a ledger, which may have a limit, and "
                "that book is not here; give its folder (ledger=..., --ledger), or the owners' word: --exact-metrics, "
                "exact_metrics=True"
            )
        if path is None or not is_begun(path):
            continue
        with contextlib.closing(Ledger(path, owner=part.party)) as book:
            if not book.limits(dataset):
                continue
            if not permitted:
                raise LedgerError(
                    f"exact sums of dataset={dataset!r}, which has a limit in ledger={str(path)!r}, are counted by no "
                    "limit; leave exact out for a charged release, or give the owners' word: --exact-metrics, "
                    "exact_metrics=True"
                )
            book.note_exact(dataset)


def check_known(parts: Sequence[PartyPart], setups: Sequence[PartySetup]) -> None:
    """Where training was charged, predictions are charged to the very books that know of it: others, new ones among
    them, know neither what was spent nor anybody's limit."""
    for part, setup in zip(parts, setups, strict=True):
        if part.ledger_run and setup.ledger is not None and not _knows(setup.ledger, part):
            raise LedgerError(
                f"ledger={str(setup.ledger)!r} does not know of this model's training: it is another book than that of "
                f"party={part.party!r}, a new one, or an older copy, and what was spent would not count; put the book "
                "back that training was charged to, or name its folder"
            )


def _knows(path: Path, part: PartyPart) -> bool:
    """Whether a book has the training that a part came from."""
    if not is_begun(path):
        return False
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        return any(entry.run == part.ledger_run for entry in book.sessions(part.dataset))

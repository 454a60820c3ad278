"""What a model's parties ask of their ledgers before rows are predicted, beside the charge itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pbmvfl.errors import LedgerError
from pbmvfl.federation.model_files import PartyPart
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.ledger.database import is_begun
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import book_of, books_of, limited


def look_exactly(parts: Sequence[PartyPart], books: Path | None, dataset: str, *, permitted: bool) -> None:
    """Check that exact sums may be seen, which no limit counts, and note the owners' permission in their ledgers.

    Every owner whose ledger has a limit is asked, whatever the rows are called: under a name that the ledger does not
    know they may be any of its rows.

    Args:
        parts: The model's parts, whose parties are asked.
        books: The folder of the parties' ledgers; None where it is not known.
        dataset: The name that the rows are given.
        permitted: Whether the owners permit it.

    Raises:
        LedgerError: A ledger has a limit and its owner has not permitted it; or training was charged to a ledger that
            is not here.
    """
    for path in limited(_ledgers(parts, books, dataset, permitted=permitted)):
        if not permitted:
            raise LedgerError(
                f"exact sums of dataset={dataset!r}: ledger={str(path)!r} has a limit, and no limit counts exact sums; "
                "leave exact out for a charged release, or give the owners' permission, which the ledger notes: "
                "--exact-metrics, exact_metrics=True"
            )
        with contextlib.closing(Ledger(path)) as ledger:
            ledger.note_exact(dataset)


def note_uncharged(parts: Sequence[PartyPart], books: Path | None, dataset: str, *, num_rows: int) -> None:
    """Note in every ledger that its owner permits predictions without a charge: a later limit does not count them."""
    for path in filter(is_begun, _ledgers(parts, books, dataset, permitted=True)):
        with contextlib.closing(Ledger(path)) as ledger:
            ledger.note_uncharged(dataset, num_rows=num_rows)


def _ledgers(parts: Sequence[PartyPart], books: Path | None, dataset: str, *, permitted: bool) -> list[Path]:
    """Return the ledger files of the model's parties; none where their folder is not known.

    Where training was charged, those are the ledgers that know of it. Only with the owners' permission, and where no
    folder is named in which it could be noted, nothing is looked at.
    """
    if books is None and permitted:
        return []
    for part in parts:
        path = None if books is None else book_of(books, part.index, part.party, dataset=dataset)
        if part.ledger_run and not (path is not None and _knows(path, part)):
            raise LedgerError(
                f"training of party={part.party!r} was charged to a ledger, which may have a limit, and that book is "
                "not here; give its folder (ledger=..., --ledger), or leave the folder out and give the owners' word "
                "for exact sums: --exact-metrics, exact_metrics=True"
            )
    return [] if books is None else books_of(books, [part.party for part in parts], dataset=dataset)


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

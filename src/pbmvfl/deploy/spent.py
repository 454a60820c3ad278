"""What a party's ledger has charged against each limit of its owner, for its status."""

from __future__ import annotations

from pathlib import Path

from pbmvfl.deploy.status import EpsilonSpent
from pbmvfl.errors import PbmvflError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.privacy.units import Adversary


def limits_spent(ledger: Path, dataset: str) -> tuple[EpsilonSpent, ...]:
    """Every limit of a dataset, read from the book as it is, also while it is charged; nothing where there is no book.

    Rounds that are charged ahead count as spent. The whole book is read: ask at ends of epochs, not in every round.
    """
    try:
        book = Ledger(ledger, must_exist=True, read_only=True)
    except (PbmvflError, OSError):
        return ()
    try:
        return tuple(_spent(book, dataset, limit) for limit in book.limits(dataset))
    except (PbmvflError, OSError):  # it changes while it is read; the next time will do
        return ()
    finally:
        book.close()


def _spent(book: Ledger, dataset: str, limit: Limit) -> EpsilonSpent:
    against = Adversary(colluding_parties=limit.colluding_parties)
    return EpsilonSpent(
        limit=f"{limit.unit}, {limit.accounting}, {against}",
        spent=spending(book, dataset, limit).epsilon,
        epsilon=limit.epsilon,
        delta=limit.delta,
    )

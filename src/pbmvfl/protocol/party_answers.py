"""Which of a party's stored answers belong to a round: a row that is asked again gets the same one, and costs nothing.

What stored answers are, and how they are kept, is in `answers`; here is what they are of. A row is known as the ledger
knows it, by the owner's name of the data and by its id, and never by its columns: an answer that changed with a cell,
or a row that is charged anew because of one, would tell of that cell, and no epsilon counts it. Columns that changed
are another question when the owner says so, by another data version, and then they are for all rows.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import SYMBOLS, Round, Split
from pbmvfl.protocol.party_network import PartyNetwork
from pbmvfl.protocol.party_rows import PartyRows
from pbmvfl.protocol.stored_answers import StoredAnswers
from pbmvfl.training.encoders import weights_digest


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswersOf:
    """A store of answers, and the owner's names of the rows that a session asks about."""

    store: StoredAnswers
    #: The owner's name of the people, under which the ledger counts.
    dataset: str = ""
    #: The owner's public name of the state that the columns are in.
    data_version: str = ""
    #: None: rows are numbered as the ledger numbers them, test rows after training rows.
    train_ids: Sequence[str] | None = None
    test_ids: Sequence[str] | None = None


class PartyAnswers:
    """Those of one party's rows and network, by the rounds of its plan. Without a store every answer is a new one."""

    def __init__(self, plan: Plan, rows: PartyRows, network: PartyNetwork, *, of: AnswersOf | None) -> None:
        self._plan, self._rows, self._network, self._of = plan, rows, network, of
        self._stored = None if of is None else of.store

    def keys(self, current: Round) -> list[bytes]:
        """Return the keys under which the answers to a round are stored; none if they are not."""
        if self._of is None or not self._plan.stores_answers(current.kind):
            return []
        names = self._names(self._of, current)
        asked: dict[str, Any] = {
            "dataset": self._of.dataset,
            "data_version": self._of.data_version,
            "event": self._plan.mechanism_for(current.kind).event.to_dict(),
        }
        if current.kind == SYMBOLS and self._plan.interactions is not None:  # no network makes these
            asked |= {"interactions": self._plan.interactions.to_dict(), "seed": self._plan.seed}
            # Which columns a row shows follows from its place: at another one it is asked about others.
            names = [f"{place} {name}" for place, name in zip(current.rows.tolist(), names, strict=True)]
        else:
            made_by = hashlib.sha256(weights_digest(self._network.encoder).encode() + self._rows.digest)
            asked |= {"vote": self._plan.vote.to_dict(), "weights": made_by.hexdigest()}
        return self._of.store.keys(asked, names)

    def all_known(self, keys: Sequence[bytes]) -> bool:
        """Whether every row of a round was answered before: then nothing new is released."""
        return bool(keys) and self._stored is not None and bool(self._stored.known(keys).all())

    def settle(self, keys: Sequence[bytes], released_BP: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What leaves: the stored answers where there are some, and the new ones, which are stored first."""
        return self._stored.settle(keys, released_BP) if keys and self._stored is not None else released_BP

    def rounds_to_charge(self) -> int:
        """Rounds after the last one with a row that has no stored answer are free."""
        schedule = self._plan.schedule
        for number in range(len(schedule) - 1, -1, -1):
            if not self.all_known(self.keys(schedule[number])):
                return number + 1
        return 0

    def close(self) -> None:
        if self._stored is not None:
            self._stored.close()

    def _names(self, of: AnswersOf, current: Round) -> list[str]:
        ids, before = of.train_ids, 0
        if current.kind.split is Split.TEST:
            ids, before = of.test_ids, self._plan.num_samples
        rows: list[int] = current.rows.tolist()
        return [str(before + row if ids is None else ids[row]) for row in rows]

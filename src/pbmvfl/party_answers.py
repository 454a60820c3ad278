"""Which of a party's stored answers belong to a round: a row that is asked again gets the same one, and costs nothing.

What stored answers are, and how they are kept, is in `answers`; here is what they are of.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from pbmvfl.answers import StoredAnswers
from pbmvfl.encoders import weights_digest
from pbmvfl.party_network import PartyNetwork
from pbmvfl.party_rows import PartyRows
from pbmvfl.plan import Plan
from pbmvfl.schedule import SYMBOLS, Round, Split


class PartyAnswers:
    """Those of one party's rows and network, by the rounds of its plan. Without a store every answer is a new one."""

    def __init__(
        self,
        plan: Plan,
        rows: PartyRows,
        network: PartyNetwork,
        *,
        stored: StoredAnswers | None,
        names: Sequence[int] | None,
    ) -> None:
        """`names` are what test rows are known by, where their place may change."""
        self._plan, self._rows, self._network = plan, rows, network
        self._stored, self._names = stored, names

    def keys(self, current: Round) -> list[bytes]:
        """Under which the answers to a round are stored; none if they are not."""
        if self._stored is None or not self._plan.stores_answers(current.kind):
            return []
        split, event = current.kind.split, self._plan.mechanism_for(current.kind).event.to_dict()
        if current.kind == SYMBOLS and self._plan.interactions is not None:  # no network makes these
            return self._stored.keys(
                {"event": event, "interactions": self._plan.interactions.to_dict(), "seed": self._plan.seed},
                split=split,
                rows=current.rows.tolist(),
                columns=self._rows.symbol_columns(split, current.rows),
                weights_digest=hashlib.sha256(b"").digest(),
            )
        digest = hashlib.sha256(weights_digest(self._network.encoder).encode() + self._rows.digest)
        return self._stored.keys(
            {"event": event, "vote": self._plan.vote.to_dict()},
            split=split,
            rows=self._names_of(current),
            columns=self._rows.columns_of(split, current.rows),
            weights_digest=digest.digest(),
        )

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

    def _names_of(self, current: Round) -> list[int]:
        if self._names is None or current.kind.split is not Split.TEST:
            return [int(row) for row in current.rows]
        return [self._names[row] for row in current.rows]

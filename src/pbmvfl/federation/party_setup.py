"""Inputs of a party, wherever it runs: its columns, its identity, its policy, its ledger and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pbmvfl.crypto.key_exchange import Identity, Session
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import OpenLedgers, PartyForecast, look_ahead
from pbmvfl.ledger.session_opening import Opening, SessionRows
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.policy import Policy
from pbmvfl.protocol.party import Party, weights_are_charged
from pbmvfl.protocol.party_rows import Features
from pbmvfl.protocol.stored_answers import AnswersOf, StoredAnswers
from pbmvfl.training.encoders import build_encoder, is_public_start
from pbmvfl.training.features import LazyRows, feature_shape, is_mapped

#: Rounds that a party of a simulation has charged in one transaction. One by one a charge takes a tenth of a round, and
#: all that a killed process can lose by more is some rounds that are charged and were not sent.
ROUNDS_AHEAD = 16
ACCEPTS_ALL = Policy()


@dataclass(frozen=True, eq=False, kw_only=True)
class PartySetup:
    """Everything of one party's owner. It stays on the owner's machine."""

    plan: Plan
    index: int
    identity: bytes
    identities: tuple[bytes, ...]
    train_features: npt.NDArray[np.float32] | npt.NDArray[np.uint8]
    test_features: npt.NDArray[np.float32] | npt.NDArray[np.uint8] | None
    policy: Policy = ACCEPTS_ALL
    #: The folder of this party's own checkpoints, and how many epochs lie between them.
    checkpoints: Path | None = None
    checkpoint_every: int = 1
    #: The folder of this party's answers to rows that were predicted; None: they are not kept. They know a row by
    #: dataset and id, as the ledger does, and by the owner's public name of the state that the columns are in. Another
    #: name is another question about every row, which is charged; changed columns alone are not.
    answers: Path | None = None
    data_version: str = ""
    #: This party's own ledger, the name it is known by there, and its names for the data and for each row in it; None:
    #: rows by their position.
    ledger: Path | None = None
    #: Whether each charge is forced to the disk before anything leaves: for machines that may lose power.
    durable: bool = False
    owner: str = ""
    dataset: str = ""
    train_ids: tuple[str, ...] | None = None
    test_ids: tuple[str, ...] | None = None
    #: Ledgers that are open already, `ledger` among them; None to open it when it is needed.
    opened: OpenLedgers | None = None
    #: This party's part of a trained model, for plans that only ask one.
    trained: Mapping[str, Tensor] | None = None
    #: Owner permits exact metrics although the ledger has a limit for these rows.
    exact_metrics: bool = False

    def build(self, encoder: nn.Module | None = None) -> Party:
        """Build the party, if its owner accepts the plan."""
        public = self.begins_publicly(encoder)
        # An own network that is not public now may be so once it has seen a row: whatever it is then is accepted here.
        self.policy.check(self.plan, public_start=public if public or self.trained is not None else None)
        if encoder is None:
            encoder = build_encoder(self.plan, index=self.index, input_shape=self._network_shape)
        keeper = None
        if self.checkpoints is not None:
            keeper = Checkpoints(folder=self.checkpoints, plan=self.plan, every=self.checkpoint_every)
        answers = self._answers_of_rows()
        try:
            return self.make_party(
                self.plan,
                index=self.index,
                train_features=self._rows(self.train_features),
                test_features=None if self.test_features is None else self._rows(self.test_features),
                encoder=encoder,
                identity=Identity.from_private_bytes(self.identity),
                identities=self.identities,
                keeper=keeper,
                answers=answers,
                trained=self.trained,
                open_guard=self._open_ledger if self.ledger is not None else None,
            )
        except BaseException:
            if answers is not None:  # nobody else could open them
                answers.store.close()
            raise

    @property
    def _network_shape(self) -> tuple[int, ...]:
        return feature_shape(self.plan, self.train_features.shape[1:], index=self.index)

    def begins_publicly(self, encoder: nn.Module | None = None) -> bool:
        """Return whether the session's first weights know rows only by what was charged for them.

        Args:
            encoder: The owner's own network; None for the plan's.
        """
        if self.trained is not None:
            return weights_are_charged(self.trained)
        return encoder is None or is_public_start(encoder, self.plan, index=self.index, input_shape=self._network_shape)

    def _answers_of_rows(self) -> AnswersOf | None:
        """Open the store; None where no round has answers to keep."""
        if self.answers is None or not any(self.plan.stores_answers(kind) for kind in self.plan.schedule.kinds):
            return None
        return AnswersOf(
            store=StoredAnswers(self.answers),
            dataset=self.dataset,
            data_version=self.data_version,
            train_ids=self.train_ids,
            test_ids=self.test_ids,
        )

    def make_party(self, plan: Plan, **arguments: Any) -> Party:
        """Make the state machine; a subclass may make one of its own."""
        return Party(plan, **arguments)

    def _rows(self, rows: Features) -> Features | LazyRows:
        """Return columns as the party is given them: those in a mapped file stay there."""
        return LazyRows(self.plan, rows, index=self.index) if is_mapped(rows) else rows

    def _open_ledger(
        self, session: Session, first_round: int, public_start: bool, unanswered: npt.NDArray[np.int64] | None
    ) -> Charging:
        assert self.ledger is not None
        if first_round:  # a checkpoint's weights may have begun otherwise than the network that was given now
            self.policy.check(self.plan, public_start=public_start)
        ledger = None if self.opened is None else self.opened.begun(self.ledger)
        if ledger is None:
            ledger = Ledger(self.ledger, owner=self.owner, durable=self.durable)
        try:
            ledger.prepare(owner=self.owner, durable=self.durable)
            return ledger.open_session(
                self._opening(
                    run=session.run_id.hex(),
                    session=session.id.hex(),
                    first_round=first_round,
                    public_start=public_start,
                    unanswered=unanswered,
                )
            )
        except BaseException:
            ledger.close()
            raise

    def forecast(self, encoder: nn.Module | None = None, *, run: str = "", first_round: int = 0) -> PartyForecast:
        """Return what this party's ledger will say to the session; nothing is written."""
        assert self.ledger is not None
        unanswered = self._unanswered(encoder, run, first_round)
        public = self.begins_publicly(encoder)
        opening = self._opening(run=run, first_round=first_round, public_start=public, unanswered=unanswered)
        return look_ahead(self.ledger, party=self.owner, opening=opening, opened=self.opened)

    def _unanswered(self, encoder: nn.Module | None, run: str, first_round: int) -> npt.NDArray[np.int64] | None:
        """Return the rows that the session will charge one by one, as `Party.unanswered` does."""
        if self.answers is None or not self.answers.is_dir():
            return None
        if self.trained is None and not 0 < self.plan.schedule.trained_at <= first_round:
            return None  # weights that are still to come have answered nothing
        own = [Identity.generate() for _ in range(self.plan.num_parties)]  # nothing is sent: no peer needs to know them
        setup = replace(self, identity=own[self.index].private_bytes(), identities=tuple(each.public for each in own))
        with contextlib.closing(setup.build(encoder)) as party:
            return party.unanswered(first_round, run_id=bytes.fromhex(run) if self.trained is None else None)

    def _opening(
        self,
        *,
        run: str,
        first_round: int,
        public_start: bool,
        unanswered: npt.NDArray[np.int64] | None,
        session: str = "",
    ) -> Opening:
        return Opening(
            dataset=self.dataset,
            plan=self.plan,
            rows=self._session_rows,
            unanswered=unanswered,
            run=run,
            session=session,
            first_round=first_round,
            public_start=public_start,
            exact_metrics=self.exact_metrics,
            rounds_ahead=ROUNDS_AHEAD,
        )

    @cached_property
    def _session_rows(self) -> SessionRows:
        return SessionRows(
            train_values=self.train_features,
            test_values=self.test_features,
            train_ids=self.train_ids,
            test_ids=self.test_ids,
        )

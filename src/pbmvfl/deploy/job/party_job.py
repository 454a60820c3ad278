"""Party's side of one job: answers to set-up, alignment and round messages.

Rows, ids, dataset name, ledger, checkpoints, weights and policy are the party's own. The server's request is compared
with them, and nothing is taken from it but the plan, which the policy accepted before.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
from torch import nn

from pbmvfl.deploy.alignment.aligned_rows import AlignedRows
from pbmvfl.deploy.alignment.messages import refused
from pbmvfl.deploy.alignment.party import PartySideAlignment
from pbmvfl.deploy.alignment.runner import party_alignment
from pbmvfl.deploy.job.admission import accept_job, own_row_ids
from pbmvfl.deploy.job.agreement import Answer, Question, disagreement, facts
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.monitoring.status import State
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec, Work
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.errors import (
    AlignmentError,
    FederationError,
    LedgerError,
    ModelError,
    OrderError,
    PbmvflError,
    PolicyError,
    ProtocolError,
)
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.model_files import PartyPart, model_digest
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.federation.serving import check_known
from pbmvfl.ledger.ledger_folder import OpenLedgers
from pbmvfl.protocol.party import Party, part_of_state, weights_are_charged
from pbmvfl.training.features import feature_shape
from pbmvfl.wire.messages import Message, MessageKind
from pbmvfl.wire.refusals import Refusal, RefusalCode

_log = logging.getLogger(__name__)
#: Unlike admission before the job, the job's own process reads and checks all rows.
_ROW_IDS = functools.partial(own_row_ids, quick=False)
#: Called with changed fields of the site's status.
OnProgress = Callable[..., None]


class PartySite:
    """One job at one party. `handle` is the handler of a link; it never raises."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, *, on_progress: OnProgress | None = None) -> None:
        self._site_folder, self._spec = site_folder, spec
        self._on_progress = on_progress
        self._party: Party | None = None
        self._setup: PartySetup | None = None
        self._rows: AlignedRows | None = None
        self._aligning: PartySideAlignment | None = None
        self._accepted = False
        #: True if the server's facts equalled this party's own at the last set-up question.
        self._agreed = False
        self._handle_lock = threading.Lock()
        self._close_lock = threading.Lock()
        #: Ending that the server sent; None before.
        self.ended: dict[str, Any] | None = None
        #: Last error, for the owner's log only; never sent.
        self.last_error: Exception | None = None

    def handle(self, channel: Channel, body: bytes) -> bytes:
        """Answer one question. An unexpected error gives an empty answer, and an entry in the owner's log."""
        answers = {
            Channel.SETUP: self._agree,
            Channel.PROTOCOL: self._receive,
            Channel.ALIGN: self._align,
            Channel.END: self._end,
        }
        try:
            with self._handle_lock:
                return answers[channel](body)
        except Exception as error:
            self._note(error)
            return b""

    def close(self) -> None:
        """Close ledger and stored answers. Idempotent."""
        with self._close_lock:
            party, self._party = self._party, None
            aligning, self._aligning = self._aligning, None
        if aligning is not None:
            aligning.close()
        if party is not None:
            party.close()

    def _report_progress(self, state: State) -> None:
        if self._on_progress is not None:
            self._on_progress(state=state, round=0 if self._party is None else self._party.completed_rounds)

    # --- set-up ---

    def _agree(self, body: bytes) -> bytes:
        mine: dict[str, str] = {}
        try:
            self._agreed = False
            question = Question.from_bytes(body)
            if not self._accepted:
                accept_job(self._site_folder, self._spec, datetime.now().astimezone(), row_ids=_ROW_IDS)
                self._accepted = True
                self._make_party()
            rows = 0 if self._rows is None else self._rows.count
            mine = facts(self._site_folder, self._spec, rows=rows)
            server = self._site_folder.federation.server
            differs = disagreement(mine, question.facts, me=self._site_folder.name, them=server)
            if differs is not None:
                self._note(FederationError(differs))
                return Answer(facts=mine, proof=b"", refused=differs).to_bytes()
            proof = b"" if self._rows is None else self._rows.proof(question.challenge, self._site_folder.name)
            self._agreed = True
            self._report_progress(State.HANDSHAKE)
            return Answer(facts=mine, proof=proof, public_start=self._public_start).to_bytes()
        except Exception as error:
            self._note(error)
            return Answer(facts=mine, proof=b"", refused=public_error_text(error)).to_bytes()

    @property
    def _public_start(self) -> bool:
        """Return whether all that this party's weights know of rows was charged."""
        setup = self._setup
        if setup is None or setup.trained is None:
            return setup is not None and PolicyFile.read(self._site_folder).encoder is None
        return weights_are_charged(setup.trained)

    def _make_party(self) -> None:
        """Build the party of this job from the organisation's folder."""
        spec, site_folder = self._spec, self._site_folder
        if spec.work is Work.ALIGN:
            self._aligning = party_alignment(site_folder, spec.alignment, PolicyFile.read(site_folder))
            return
        policy = PolicyFile.read(site_folder)
        self._rows = AlignedRows.load(site_folder.alignment(spec.alignment))
        predicting = spec.work is Work.PREDICT
        part = PartyPart.load(site_folder.model(spec.run)) if predicting else None
        own: dict[str, Any] = {}
        if part is None:
            own = {"train_features": self._rows.features, "train_ids": self._rows.ids, "test_features": None}
        else:
            own = {
                "train_features": np.empty((0, *part.shape), dtype=part.dtype),
                "test_features": self._rows.features,
                "test_ids": self._rows.ids,
                "trained": part.state,
            }
        self._setup = PartySetup(
            plan=spec.run_plan,
            index=site_folder.index,
            identity=site_folder.identity().private_bytes(),
            identities=site_folder.pins().parties,
            policy=policy.policy(),
            checkpoints=None if predicting else site_folder.run(spec.run) / "checkpoints",
            answers=site_folder.model(spec.run) / "answers",
            ledger=site_folder.ledger,
            durable=True,
            owner=site_folder.name,
            dataset=policy.dataset,
            data_version=policy.data.version,
            **own,
        )
        if part is not None:
            if part.columns is not None and part.columns.to_dict() != self._rows.columns.to_dict():
                raise ModelError("the rows have other columns than the model was trained on; align them by its schema")
            with OpenLedgers() as opened:
                check_known([part], [site_folder.ledger], opened)
        self._party = self._setup.build(self._own_encoder(policy, self._setup))

    def _own_encoder(self, policy: PolicyFile, setup: PartySetup) -> nn.Module | None:
        """Return the network that the owner's policy names; None for the plan's."""
        if policy.encoder is None:
            return None
        module, _, function = policy.encoder.partition(":")
        make = getattr(importlib.import_module(module), function)
        shape = feature_shape(setup.plan, setup.train_features.shape[1:], index=setup.index)
        network: nn.Module = make(setup.plan, setup.index, shape)
        return network

    # --- alignment ---

    def _align(self, body: bytes) -> bytes:
        if self._spec.work is not Work.ALIGN or self._aligning is None:
            return refused("nothing was agreed on yet: set-up comes first")
        self._report_progress(State.ALIGNING)
        answer = self._aligning.receive(body)
        if self._aligning.last_error is not None:
            self._note(self._aligning.last_error)
        return answer

    # --- rounds ---

    def _receive(self, body: bytes) -> bytes:
        party = self._party
        if party is None or not self._agreed:
            return _refusal(self._site_folder.index, "nothing was agreed on yet: set-up comes first")
        if self._spec.work is Work.TRAIN and (other := _starts_run(body)) not in ("", self._spec.run_id):
            # Both the ledger's session count and the checkpoints are keyed by the run.
            return _refusal(self._site_folder.index, f"run={other}: this party was asked for run {self._spec.run_id}")
        answer = party.receive(body)
        if party.last_error is not None:
            self._note(party.last_error)
        self._report_progress(State.PREDICTING if self._spec.work is Work.PREDICT else State.TRAINING)
        return answer

    # --- the end ---

    def _end(self, body: bytes) -> bytes:
        """End the job; after training, save this party's part of the model, which never leaves the site."""
        try:
            said = json.loads(body)
            if not isinstance(said, dict):
                raise FederationError("the end of the work is not of the form that this version writes")
            completed = said.get("completed_rounds")
            if said.get("ending") in ("done", "stopped") and self._spec.work is Work.TRAIN and completed:
                self._save_part(int(completed))
            self.ended = {name: str(said.get(name, ""))[:1000] for name in ("ending", "words")}
            return json.dumps({"kept": True}).encode()
        except Exception as error:
            self._note(error)
            self.ended = {"ending": "failed", "words": public_error_text(error)}
            return json.dumps({"kept": False, "words": public_error_text(error)}).encode()
        finally:
            self.close()

    def _save_part(self, completed: int) -> None:
        plan, rows, setup = self._spec.run_plan, self._rows, self._setup
        assert rows is not None
        assert setup is not None
        run_id = bytes.fromhex(self._spec.run_id)
        assert setup.checkpoints is not None
        keeper = Checkpoints(folder=setup.checkpoints, plan=plan, strict=True)
        kept = [number for number in keeper.rounds(run_id) if number <= min(completed, plan.schedule.settled_at)]
        if not kept:
            raise AlignmentError("there is no checkpoint of this run to make a model of")
        PartyPart(
            model=model_digest(plan, run_id),
            plan=plan,
            dataset=setup.dataset,
            state=part_of_state(plan, keeper.load(run_id, kept[-1])),
            index=self._site_folder.index,
            party=self._site_folder.name,
            shape=tuple(setup.train_features.shape[1:]),
            dtype=str(setup.train_features.dtype),
            columns=rows.columns,
            own_network=PolicyFile.read(self._site_folder).encoder is not None,
            ledger_run=self._spec.run_id,
        ).save(self._site_folder.model(self._spec.run))

    def _note(self, error: Exception) -> None:
        self.last_error = error
        if isinstance(error, PbmvflError):
            _log.warning("%s", error)
        else:
            _log.error("%s", error, exc_info=error)


def public_error_text(error: Exception) -> str:
    """Return the public text of an error.

    Texts about files are the owner's: such an error is only named as one.
    """
    match error:
        case PolicyError() | ProtocolError() | OrderError():
            return str(error)
        case LedgerError():
            return "its ledger cannot be charged now; its owner's log says why"
        case AlignmentError():
            return "it has no rows in this order; its owner's log says why. Align again"
        case _:
            return Refusal.of(error).words


def _starts_run(body: bytes) -> str:
    """Return the run id that a START message names; "" for other messages."""
    try:
        message = Message.from_bytes(body)
    except ProtocolError:
        return ""
    return message.run_id.hex() if message.kind is MessageKind.START else ""


def _refusal(index: int, words: str) -> bytes:
    payload = Refusal(RefusalCode.MESSAGE, words).to_payload()
    return Message(MessageKind.REFUSAL, index, payload=payload).to_bytes()

"""Federation: all roles in one place, with the draws and the messages of a real one. The embedded default.

Each party's columns go to that party's state machine alone and the labels to the server's; what passes between them is
the bytes of the wire. Only the simulator's evaluation looks at exact sums, and it says so.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pbmvfl.crypto.entropy import Entropy, SystemEntropy
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import CheckpointError, EncoderError, LedgerError, ModelError, PlanError
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.drawn_labels import FOLDER as DRAWN_LABELS
from pbmvfl.federation.drawn_labels import LabelHolder, keep_draw, with_true_labels
from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.model import FederatedModel
from pbmvfl.federation.model_files import PartyPart, ServerPart, model_digest
from pbmvfl.federation.party_processes import Processes
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.federation.release_log import ReleaseLog
from pbmvfl.federation.results import Result
from pbmvfl.federation.run import Run
from pbmvfl.federation.trackers import Callback
from pbmvfl.ledger.ledger_folder import (
    PartyForecast,
    check_folder,
    check_reaches_end,
    label_ledger_for,
    ledger_files_for,
    make_folder,
)
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import part_of_state
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Tap
from pbmvfl.protocol.transport import Transport
from pbmvfl.training.encoders import build_encoder, check_distinct
from pbmvfl.training.features import feature_shape, mapped
from pbmvfl.training.updates import check_trainable
from pbmvfl.wire.traffic import Traffic

#: Called after every round with (completed rounds, the last loss, traffic so far).
OnRound = Callable[[int, float, Traffic], None]
#: Called after every epoch with its line of the history.
OnEpoch = Callable[[EpochLine], None]


class Parties(StrEnum):
    """Places where the parties run."""

    IN_PROCESS = "in-process"
    PROCESSES = "processes"

    @classmethod
    def named(cls, name: str) -> Parties:
        """Return the place with this name.

        Raises:
            PlanError: The name is unknown.
        """
        if name not in tuple(cls):
            raise PlanError(f"parties={name!r} is not one of {', '.join(cls)}")
        return cls(name)


class Federation:
    """All roles of a federation in one place. `fit` trains it and returns the result and what it cost.

    Args:
        plan: Every public number of the run.
        encoders: One network for each party, inside `pbmvfl.training.encoders.Bounded`; None for those of the plan.
        parties: Where the parties run: "in-process" or "processes".

    Raises:
        PlanError: The encoders do not fit the plan or the place.
    """

    #: Class that makes a party; a subclass may have another.
    setup_kind: ClassVar[type[PartySetup]] = PartySetup
    #: Whether the parties' noise is known, as in tests: then no epsilon is claimed.
    noise_is_seeded: bool = False

    def __init__(
        self,
        plan: Plan,
        *,
        encoders: Sequence[nn.Module] | None = None,
        parties: Parties | str = Parties.IN_PROCESS,
    ) -> None:
        self.plan = plan
        self._encoders = encoders
        self._first_weights: list[dict[str, Any]] = []
        self._parties = Parties.named(parties)
        if encoders is not None:
            if len(encoders) != plan.num_parties:
                raise PlanError(f"{len(encoders)} encoders for num_parties={plan.num_parties}")
            if self._parties is Parties.PROCESSES:
                raise PlanError("parties=processes builds the plan's encoders; own networks need parties=in-process")
            check_distinct(encoders)
            self._first_weights = [copy.deepcopy(encoder.state_dict()) for encoder in encoders]
        #: Called with (direction, party, bytes) for every message, whatever it is.
        self.taps: list[Tap] = []
        #: Model of the last `fit`; None before it.
        self.model: FederatedModel | None = None
        #: Labels of the training rows as the server used them in the last `fit`: drawn ones, if the plan draws them.
        self.labels: npt.NDArray[np.int64] | None = None

    def fit(
        self,
        data: VerticalDataset,
        *,
        checkpoints: Path | str | None = None,
        checkpoint_every: int = 1,
        sessions: Path | str | None = None,
        ledger: Path | str | None = None,
        exact_metrics: bool = False,
        until_limit: bool = False,
        redraw_labels: bool = False,
        fusion: Any = None,
        on_round: OnRound | None = None,
        on_epoch: OnEpoch | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Result:
        """Train to the end of the plan, from the newest checkpoint that all roles have.

        Args:
            data: Every party's columns, and the labels.
            checkpoints: Folder in which every role has a folder with its own checkpoints; None for none.
            checkpoint_every: Epochs between two checkpoints; one more is written at the end.
            sessions: Folder of the count of releases; None for `checkpoints`.
            ledger: Folder of the parties' ledgers and of the label holder's, with its store of drawn labels; None:
                nothing is charged.
            exact_metrics: The owners permit evaluation=simulator to use exact sums of rows that have a limit.
            until_limit: Run up to a limit of a ledger. Otherwise a run that a limit would end early is refused before
                anything is released.
            redraw_labels: The label holder permits that labels whose stored draws were lost are drawn, and charged, a
                second time.
            fusion: The label holder's own scikit-learn classifier, as its fusion model; a copy of it is fitted. A saved
                model needs it again (`pbmvfl.load`). None: the plan's fusion model.
            on_round: Called after every round with (completed rounds, last loss, traffic so far).
            on_epoch: Called after every epoch with its line of the history.
            callbacks: Observers, such as the trackers of `pbmvfl.federation.trackers`.

        Returns:
            Metrics, history, measured costs and, where there is one, the model. `stopped` says why a run ended early.

        Raises:
            PlanError: The plan does not fit the data.
            BudgetExceeded: A limit would end the run early.
            LedgerError: A ledger cannot be used, or drawn labels that it knows are lost.
            AnswersError: The store of drawn labels is damaged or in use.
            CheckpointError: A checkpoint is damaged, or another run's.
            EncoderError: A network does not take its party's rows, or would break the account.
        """
        checkpoints, sessions, ledger = (
            None if folder is None else Path(folder) for folder in (checkpoints, sessions or checkpoints, ledger)
        )
        self.check(data)
        check_own_fusion(self.plan, fusion)
        if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 1:
            raise PlanError(f"checkpoint_every={checkpoint_every!r} must be an integer of at least 1, in epochs")
        keeper = None
        if checkpoints is not None:
            keeper = Checkpoints(folder=checkpoints / "server", plan=self.plan, every=checkpoint_every)
            # Names what differs in another plan, of which the log of releases has only hashes.
            newest_common_round(self.plan, checkpoints)
        for encoder, first in zip(self._encoders or (), self._first_weights, strict=True):
            encoder.load_state_dict(first)  # a second fit starts where the first one did
        if ledger is not None:
            ahead = self.forecast(
                data, ledger, checkpoints=checkpoints, exact_metrics=exact_metrics, redraw_labels=redraw_labels
            )
            if not until_limit:
                check_reaches_end(ahead, dataset=data.name, rounds=len(self.plan.schedule))
        for callback in callbacks:
            callback.on_start(self.plan)
        with contextlib.ExitStack() as opened:
            log = ReleaseLog(sessions, plan_hash=self.plan.hash.hex(), moved_from=checkpoints)
            opened.callback(log.close)
            # From here on this process alone may write the folder, so what is read now stays true.
            released = bool(log.records)
            if ledger is not None:
                draws = self.plan.label_response is not None
                check_ledgers(ledger, data, released=released, draws_labels=draws)
            holder = self._label_holder(data, ledger, checkpoints, redraw=redraw_labels)
            labels = holder.draw(
                self.plan.label_response, data.train_labels, resumes=released, entropy=self.label_entropy()
            )
            for note in labels.notes:
                warnings.warn(note, UserWarning, stacklevel=2)
            if self.plan.label_response is not None and keeper is not None:
                keep_draw(keeper.folder, labels.labels_N, resumes=released)
            self.labels = labels.labels_N
            server = Server(
                self.plan,
                train_labels=with_true_labels(self.plan, labels.labels_N, data.train_labels),
                estimator=fusion,
                run_id=(None if keeper is None else keeper.run_id) or self.new_run_id(),
                keeper=keeper,
            )
            setups = self.party_setups(data, ledger, checkpoints, checkpoint_every, exact_metrics=exact_metrics)
            transport = self._open_transport(setups)
            opened.enter_context(_closed_at_the_end(transport))
            run = Run(
                server,
                transport,
                data,
                log=log,
                keeper=keeper,
                inspection=transport if self.plan.evaluation is Evaluation.SIMULATOR else None,
                owners=transport,
                noise_is_seeded=self.noise_is_seeded,
                taps=self.taps,
                on_round=on_round,
                on_epoch=on_epoch,
                callbacks=callbacks,
            )
            result = run.finish()
            model = self._trained(data, server, transport, checkpoints, ledger, own_fusion=fusion)
            self.model = model
            result = replace(result, model=model)
        for callback in callbacks:
            callback.on_end(result)
        return result

    def _label_holder(
        self, data: VerticalDataset, ledger: Path | None, checkpoints: Path | None, *, redraw: bool
    ) -> LabelHolder:
        """Return the label holder's side of the draw.

        Rows without ids are other rows in another table: their draws are kept for one run alone.
        """
        outlives_run = ledger is not None and data.rows_are_named
        store = None
        if outlives_run and ledger is not None:
            store = ledger / DRAWN_LABELS
        elif checkpoints is not None:
            store = checkpoints / "server" / DRAWN_LABELS
        return LabelHolder(
            dataset=data.name,
            class_names=data.class_names,
            label=data.label or "",
            row_ids=data.train_ids,
            store=store,
            store_is_of_run=not outlives_run,
            ledger=None if ledger is None or self.plan.label_response is None else label_ledger_for(ledger, data),
            redraw=redraw,
        )

    # --- the model ---

    def save(self, folder: Path | str) -> Path:
        """Write the model of the last `fit`, every part in a folder of its own; `pbmvfl.load` reads it back.

        Args:
            folder: A new folder, or an empty one.

        Returns:
            The folder.

        Raises:
            ModelError: There is no trained model.
        """
        if self.model is None:
            raise ModelError("there is no trained model yet; call fit(data) first (parties=processes need checkpoints)")
        return self.model.save(folder)

    def _trained(
        self,
        data: VerticalDataset,
        server: Server,
        transport: InProcess | Processes,
        checkpoints: Path | None,
        ledger: Path | None,
        *,
        own_fusion: Any,
    ) -> FederatedModel | None:
        """Return the trained model, or None.

        Weights never pass a transport, so the parts of parties in processes come from their checkpoints; without
        checkpoints there is no model.
        """
        plan = self.plan
        if not server.completed_rounds:
            return None
        if isinstance(transport, InProcess):
            states = [party.part_state() for party in transport.parties]
        elif checkpoints is not None and (completed := newest_common_round(plan, checkpoints, strict=True)):
            folders = [checkpoints / f"party-{index}" for index in range(plan.num_parties)]
            keepers = [Checkpoints(folder=folder, plan=plan, strict=True) for folder in folders]
            states = [part_of_state(plan, keeper.load(server.run_id, completed)) for keeper in keepers]
        else:
            return None
        shared: dict[str, Any] = {
            "model": model_digest(plan, server.run_id),
            "plan": plan,
            "dataset": data.name,
        }
        columns = data.columns or (None,) * plan.num_parties
        parts = [
            PartyPart(
                **shared,
                state=state,
                index=index,
                party=data.party_names[index],
                shape=data.train_features[index].shape[1:],
                dtype=str(data.train_features[index].dtype),
                columns=columns[index],
                own_network=self._encoders is not None,
                ledger_run="" if ledger is None else server.run_id.hex(),
            )
            for index, state in enumerate(states)
        ]
        server_part = ServerPart(
            **shared,
            party_names=data.party_names,
            class_names=data.class_names,
            state=server.part_state(),
            label=data.label,
            own_fusion=own_fusion is not None and server.fusion is not None and server.fusion.beats_majority,
        )
        return FederatedModel(
            server_part,
            parts,
            fusion=own_fusion if server_part.own_fusion else None,
            encoders=None if self._encoders is None else [copy.deepcopy(encoder) for encoder in self._encoders],
            ledger=ledger,
            checkpoints=checkpoints,
            setup_kind=self.setup_kind,
            noise_is_seeded=self.noise_is_seeded,
        )

    def __reduce__(self) -> str:
        raise ModelError(
            "a Federation cannot be pickled: it holds every party's side, and a pickle runs code when it is read; save "
            "the model, federation.save(folder), and read it with pbmvfl.load(folder)"
        )

    def forecast(
        self,
        data: VerticalDataset,
        ledger: Path,
        *,
        checkpoints: Path | None = None,
        exact_metrics: bool = False,
        redraw_labels: bool = False,
    ) -> list[PartyForecast]:
        """Return what every ledger will say to a run, or to one that is resumed. Nothing is written.

        Args:
            data: The rows of the run.
            ledger: Folder of the ledgers.
            checkpoints: Folder to resume from; None for a new run.
            exact_metrics: As in `fit`.
            redraw_labels: As in `fit`.

        Returns:
            One for each party, and, if labels are drawn, the label holder's.

        Raises:
            LedgerError: A ledger cannot be used, or refuses the run.
        """
        check_folder(ledger)
        run, first_round = None, 0
        if checkpoints is not None:
            run = Checkpoints(folder=checkpoints / "server", plan=self.plan).run_id
            first_round = newest_common_round(self.plan, checkpoints)
        found = []
        # A forecast sends nothing, so no party needs an identity for it.
        for setup in self._setups_without_identity(data, ledger, checkpoints, 1, exact_metrics=exact_metrics):
            own = None if self._encoders is None else self._encoders[setup.index]
            found.append(setup.forecast(own, run="" if run is None else run.hex(), first_round=first_round))
        if (response := self.plan.label_response) is not None:
            holder = self._label_holder(data, ledger, checkpoints, redraw=redraw_labels)
            found.append(holder.forecast(response, data.num_samples, resumes=first_round > 0))
        return found

    def check(self, data: VerticalDataset) -> None:
        """Refuse a plan that cannot be trained on this data, before anything is written.

        Args:
            data: The rows to train on.

        Raises:
            PlanError: A size of the plan is not that of the data.
            EncoderError: The plan's encoder does not take a party's rows.
        """
        check_trainable(self.plan)
        for name in ("num_parties", "num_samples", "num_classes", "num_test_samples"):
            mine, given = getattr(self.plan, name), getattr(data, name)
            if mine != given:
                raise PlanError(f"{name}={mine} in the plan, {given} in the data; make the plan with Plan.for_data")
        if self._encoders is None:
            kinds = {
                (feature_shape(self.plan, part.shape[1:], index=index), part.dtype): (index, part)
                for index, part in enumerate(data.train_features)
            }
            for (shape, _), (index, features) in kinds.items():
                _check_encoder_takes(self.plan, mapped(self.plan, features[:0], index=index), shape)

    # --- what a subclass may override ---

    def new_run_id(self) -> bytes | None:
        """Return the run's id, or None: the server draws one."""
        return None

    def label_entropy(self) -> Entropy:
        """Return the source of randomness by which labels are drawn."""
        return SystemEntropy()

    def new_identity(self, index: int) -> Identity:
        """Return a party's key pair. Here it is new for each run; at an organisation it is long-lived.

        Args:
            index: The party's number.
        """
        del index
        return Identity.generate()

    def party_setups(
        self,
        data: VerticalDataset,
        ledger: Path | None,
        checkpoints: Path | None,
        checkpoint_every: int,
        *,
        exact_metrics: bool = False,
    ) -> list[PartySetup]:
        """Return every party's own side of a run, with new identities.

        Args:
            data: The rows to train on.
            ledger: Folder of the parties' ledgers, or None: nothing is charged.
            checkpoints: Folder of the run's checkpoints, or None.
            checkpoint_every: Epochs from one checkpoint to the next.
            exact_metrics: Whether the owners permit exact metrics of rows with a limit.
        """
        setups = self._setups_without_identity(data, ledger, checkpoints, checkpoint_every, exact_metrics=exact_metrics)
        identities = [self.new_identity(setup.index) for setup in setups]
        pinned = tuple(identity.public for identity in identities)
        return [
            replace(setup, identity=identity.private_bytes(), identities=pinned)
            for setup, identity in zip(setups, identities, strict=True)
        ]

    def _setups_without_identity(
        self,
        data: VerticalDataset,
        ledger: Path | None,
        checkpoints: Path | None,
        checkpoint_every: int,
        *,
        exact_metrics: bool,
    ) -> list[PartySetup]:
        # Only ledgers and stored answers ask for ids, and a party in a process of its own gets a copy.
        named = ledger is not None or checkpoints is not None
        ledgers = None if ledger is None else ledger_files_for(ledger, data)
        return [
            self.setup_kind(
                plan=self.plan,
                index=index,
                identity=b"",
                identities=(),
                train_features=data.train_features[index],
                test_features=data.test_features[index] if data.num_test_samples else None,
                checkpoints=None if checkpoints is None else checkpoints / f"party-{index}",
                checkpoint_every=checkpoint_every,
                answers=None if checkpoints is None else checkpoints / f"party-{index}" / "answers",
                ledger=None if ledgers is None else ledgers[index],
                owner=data.party_names[index],
                dataset=data.name,
                train_ids=data.train_ids if named else None,
                test_ids=data.test_ids if named else None,
                exact_metrics=exact_metrics,
            )
            for index in range(self.plan.num_parties)
        ]

    def _open_transport(self, setups: Sequence[PartySetup]) -> InProcess | Processes:
        if self._parties is Parties.PROCESSES:
            return Processes(setups)
        return InProcess(setups, self._encoders)


@contextlib.contextmanager
def _closed_at_the_end(transport: Transport) -> Iterator[None]:
    """Close the transport at the end. An error of the block is raised first; one of closing becomes a note of it."""
    try:
        yield
    except BaseException as error:
        try:
            transport.close()
        except Exception as later:
            error.add_note(f"Closing the parties failed after it: {later}")
        raise
    transport.close()


def newest_common_round(plan: Plan, checkpoints: Path, *, strict: bool = False) -> int:
    """Return the round at which a run with all its roles in one folder resumes; 0 if it begins anew.

    Args:
        plan: The run's plan.
        checkpoints: The folder with a folder for each role.
        strict: Refuse a damaged index instead of using the one before it.
    """
    folders = [checkpoints / "server", *(checkpoints / f"party-{index}" for index in range(plan.num_parties))]
    kept = [Checkpoints(folder=folder, plan=plan, strict=strict) for folder in folders]
    run_id = kept[0].run_id
    if run_id is None:  # the server is the last to write: a run that ended before it did has no name yet
        return 0
    for each in kept:
        if each.run_id not in (None, run_id):
            raise CheckpointError(
                f"{each.folder} has checkpoints of another run than {kept[0].folder}; put back those that belong "
                "together, or start a new run"
            )
    return max(set.intersection(*(set(each.rounds(run_id)) for each in kept)), default=0)


def _check_encoder_takes(plan: Plan, features: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Build the plan's encoder and pass one row of zeros through it."""
    kind = torch.from_numpy(features).dtype
    try:
        with torch.no_grad():
            encoder = build_encoder(plan, index=0, input_shape=shape).eval()
            encoder(torch.zeros((1, *shape), dtype=kind))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, EncoderError):
            raise
        raise EncoderError(
            f"encoder={plan.encoder} cannot take rows of shape={tuple(shape)} and type {kind}: {error}; "
            "choose another encoder"
        ) from error


def check_own_fusion(plan: Plan, fusion: Any) -> None:
    """Refuse an own fusion model that cannot be one, before anything is released."""
    if fusion is None:
        return
    if not plan.num_fusion_samples:
        raise PlanError("fusion=...: this plan has no fusion rows to teach it; plan with num_fusion_samples above 0")
    if not all(hasattr(fusion, name) for name in ("fit", "predict_proba", "get_params")):
        raise PlanError(
            f"fusion={type(fusion).__name__} must be a scikit-learn classifier with fit, predict_proba and get_params"
        )


def check_ledgers(folder: Path, data: VerticalDataset, *, released: bool, draws_labels: bool) -> None:
    """Refuse to resume a run with ledgers other than those that know its releases; make the folder for a new run."""
    if not released:
        make_folder(folder)
        return
    labels = [label_ledger_for(folder, data)] if draws_labels else []
    for path in [*ledger_files_for(folder, data), *labels]:
        if not path.is_file():
            raise LedgerError(
                f"ledger={str(path)!r} does not exist, but this run has released rounds, and a new ledger would not "
                "know of them; put it back where it was, or start a new run"
            )

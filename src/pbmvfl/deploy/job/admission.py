"""Whether a site takes an order: asked before any process of the job exists, and again by the process itself.

What is refused is said in public words: the order's own values and what is permitted. What is wrong at home (a policy
that cannot be read, a book in use, what rows have spent) is for the owner's log, and the answer says only to ask there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.deploy.site.folder import Home
from pbmvfl.deploy.site.job_spec import Order, Work
from pbmvfl.deploy.site.policy_file import PolicyFile, own_book
from pbmvfl.errors import FederationError, ModelError, OrderError, PbmvflError, PolicyError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import PartyForecast, check_reaches_end
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan

log = logging.getLogger(__name__)

#: A run name's first plan and number, and how often it was taken up.
BOUND = "bound.json"
#: Of a party: how many alignments were made here.
ALIGNMENTS_MADE = "alignments.json"
#: `federation.model_files.INDEX`, which is not imported here: torch would come with it, into a process that only looks.
MODEL_INDEX = "part.json"
#: `federation.model_files.WEIGHTS_FILE`, and the flag in it that `party.weights_are_charged` reads, for the same
#: reason.
WEIGHTS_FILE, PUBLIC_START = "weights.safetensors", "run.public_start"
#: Beside it, where a party keeps what it has answered.
ANSWERS = "answers"
#: Rounds that are looked ahead over: some seconds. A longer run is ended by the limit itself, when it is there.
FORESEEN_ROUNDS = 50_000
#: Rows whose ids are read in the process that is there all the time; a job's own process reads them however many.
FORESEEN_ROWS = 200_000
_LOCK = "admission.lock"
PRIVATE_REASON = "this site cannot take the order now; its operators find the reason in their log"

#: The ids of an order's rows, as this party's book knows them: those that are trained on, and those that are predicted.
#: None where there are none.
RowIds = Callable[[Home, Order], tuple[Sequence[str] | None, Sequence[str] | None]]


def admit(home: Home, order: Order, now: datetime, *, row_ids: RowIds | None = None) -> None:
    """Refuse an order that this site does not take; `PolicyError` and `OrderError` have public words.

    `now` is by the site's own clock. With `row_ids` a party looks ahead what its limits say to exactly these rows.
    """
    with _public_words():
        _check_federation(home, order)
        policy = PolicyFile.read(home)
        _check_hours(policy, now)
        if order.plan is not None:
            _check_evaluation(order.plan)
        _check_run(home, order, most=policy.runs.sessions)
        if order.work is Work.ALIGN:
            _check_alignments(home, order, policy)
            if home.is_server:
                return
            with own_book(home, policy):  # a party that cannot keep a book takes part in nothing
                return
        if not home.alignment(order.alignment).is_dir():
            raise OrderError(
                f"alignment={order.alignment}: this site has no such rows; permitted: one that was made with "
                "`pbmvfl align`"
            )
        if order.work is Work.PREDICT:
            _check_model(home, order)
        if not home.is_server:
            _check_party(home, order, policy, row_ids)


def take_up(home: Home, order: Order, now: datetime, *, row_ids: RowIds | None = None) -> None:
    """Admit an order once more, in the process that does it, and write down that this site has taken it up.

    From then on the run's name stands for this plan and this number, and an alignment is counted, whatever comes of it.
    """
    with _public_words(), _alone(home):
        admit(home, order, now, row_ids=row_ids)
        if order.work is Work.ALIGN:
            if not home.is_server:
                made = _alignments_made(home)
                _write(home.path / ALIGNMENTS_MADE, {"made": made + 1})
        elif order.work is Work.TRAIN:
            folder = home.run(order.run)
            make_private_folder(folder)
            _write(folder / BOUND, {**_binding(order), "taken_up": _times_taken_up(folder) + 1})


def own_row_ids(home: Home, order: Order) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """Of the alignment that an order names."""
    from pbmvfl.deploy.alignment.aligned_rows import AlignedRows

    ids = AlignedRows.load(home.alignment(order.alignment), quick=True).ids
    return (None, ids) if order.work is Work.PREDICT else (ids, None)


@contextlib.contextmanager
def _alone(home: Home) -> Iterator[None]:
    """One process of this site at a time: two that count at once would count one."""
    descriptor = os.open(home.path / _LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _public_words() -> Iterator[None]:
    """Refusals go out as they are; whatever else is wrong here goes to the owner's log."""
    try:
        yield
    except (PolicyError, OrderError):
        raise
    except (PbmvflError, OSError) as error:
        log.error("an order was refused: %s", error)
        raise PolicyError(PRIVATE_REASON) from error


# --- what everybody checks ---


def _check_federation(home: Home, order: Order) -> None:
    federation = home.federation
    if order.federation != federation.name:
        raise OrderError(f"federation={order.federation}: this site is of federation {federation.name}")
    there = len(federation.parties)
    if order.plan is not None and order.plan.num_parties != there:
        raise OrderError(
            f"num_parties={order.plan.num_parties}: federation {federation.name} has {there} parties; plan with so many"
        )


def _check_hours(policy: PolicyFile, now: datetime) -> None:
    hours = policy.runs.hours
    if hours is not None and not hours.permit(now):
        raise PolicyError(f"time={now:%H:%M} at this site: the policy permits {hours}; submit it then")


def _check_evaluation(plan: Plan) -> None:
    """Also at the server, whose policy is about no plan: there is nobody in a deployment who may see exact sums."""
    if plan.evaluation is Evaluation.SIMULATOR:
        raise PolicyError(
            "evaluation=simulator: nobody sees exact sums in a deployment; plan with evaluation=none or "
            "evaluation=released"
        )


# --- runs, by their names ---


def _binding(order: Order) -> dict[str, Any]:
    assert order.plan is not None
    return {"run_id": order.run_id, "plan": order.plan.hash.hex(), "alignment": order.alignment}


def _read_binding(folder: Path) -> dict[str, Any] | None:
    path = folder / BOUND
    if not path.exists():
        return None
    return read_object(path, {"run_id": str, "plan": str, "alignment": str, "taken_up": int}, FederationError)


def _times_taken_up(folder: Path) -> int:
    known = _read_binding(folder)
    return 0 if known is None else int(known["taken_up"])


def _check_run(home: Home, order: Order, *, most: int) -> None:
    """A name that has stood for one plan and one number here stands for no other."""
    if order.work is Work.ALIGN:
        return
    known = _read_binding(home.run(order.run))
    if known is None:
        if order.work is Work.PREDICT:
            raise OrderError(f"run={order.run}: this site has trained no such run; permitted: one that it has")
        return
    if known["run_id"] != order.run_id:
        raise OrderError(
            f"run={order.run}, run_id={order.run_id}: here that name stands for run_id={known['run_id']}; go on with "
            "that one, or choose another name"
        )
    if order.work is Work.PREDICT:
        return
    for name, value in _binding(order).items():
        if known[name] != value:
            raise OrderError(
                f"run={order.run}: here that name was begun with another {name}; go on with that one, or choose "
                "another name"
            )
    if known["taken_up"] >= most:
        raise PolicyError(
            f"run={order.run} was begun {known['taken_up']} times: the policy permits {most} sessions of a run; train "
            "under another name"
        )


def _check_model(home: Home, order: Order) -> None:
    """A part of exactly the model that is asked about."""
    path = home.model(order.run) / MODEL_INDEX
    if not path.is_file():
        raise OrderError(f"run={order.run}: this site has no part of its model; train it to its end first")
    said = read_object(path, {"model": str}, ModelError)
    if order.plan is None or said["model"] != order.plan.model:
        raise OrderError(
            f"run={order.run}: the order is about another model than the one that this site has of that run; train it, "
            "or predict with the model that is here"
        )


# --- alignments ---


def _alignments_made(home: Home) -> int:
    path = home.path / ALIGNMENTS_MADE
    made: int = read_object(path, {"made": int}, FederationError)["made"] if path.exists() else 0
    return made


def _check_alignments(home: Home, order: Order, policy: PolicyFile) -> None:
    for folder in sorted((home.path / "runs").glob("*")):
        known = _read_binding(folder)
        if known is not None and known["alignment"] == order.alignment:  # it would go on with other rows
            raise OrderError(
                f"alignment={order.alignment}: run={folder.name} was begun here with these rows; choose another name"
            )
    if not home.is_server and (made := _alignments_made(home)) >= policy.runs.alignments:
        raise PolicyError(
            f"alignments={made} were made here: the policy permits {policy.runs.alignments}; use one that is there"
        )


# --- what a party checks ---


def _check_party(home: Home, order: Order, policy: PolicyFile, row_ids: RowIds | None) -> None:
    assert order.plan is not None
    policy.policy().check(order.plan, public_start=begins_publicly(policy, order.plan, home.model(order.run)))
    with own_book(home, policy) as book:
        if (trouble := book.trouble()) is not None:
            raise FederationError(f"{home.ledger} {trouble}")
        begun = [entry for entry in book.sessions(policy.data.dataset) if entry.run == order.run_id]
        if order.work is Work.TRAIN and len(begun) >= policy.runs.sessions:
            raise PolicyError(
                f"run={order.run} has had {len(begun)} sessions: the policy permits {policy.runs.sessions}; train "
                "under another name"
            )
        # A training that goes on was looked at when it was begun, and at which round it goes on is not known yet. Rows
        # that were answered before get the same answer for nothing, and which those are only a party knows.
        goes_on = bool(begun) if order.work is Work.TRAIN else (home.model(order.run) / ANSWERS).is_dir()
        if row_ids is not None and not policy.runs.until_limit and not goes_on:
            _look_ahead(home, order, policy, book, row_ids)


def begins_publicly(policy: PolicyFile, plan: Plan, part: Path | None = None) -> bool | None:
    """Return whether a session's first weights know rows only by what was charged; None where it is not known here.

    The job's own process looks again, with the networks themselves.

    Args:
        policy: The party's own.
        plan: The plan of the session.
        part: The folder of this party's part of the model that the plan asks.
    """
    if not plan.model:
        return True if policy.encoder is None else None
    if part is None:
        return None
    try:
        with safe_open(part / WEIGHTS_FILE, framework="np") as file:
            flag = file.get_tensor(PUBLIC_START)
            return bool(flag.size == 1 and flag.all())
    except (OSError, SafetensorError):
        return False  # nothing says that they are


def _look_ahead(home: Home, order: Order, policy: PolicyFile, book: Ledger, row_ids: RowIds) -> None:
    """Refuse a run that a limit would end early. By how much is private."""
    plan = order.plan
    assert plan is not None
    rounds = len(plan.schedule)
    if rounds > FORESEEN_ROUNDS:
        return
    train, test = row_ids(home, order)
    found = book.forecast(
        dataset=policy.data.dataset,
        plan=plan,
        run="" if order.work is Work.PREDICT else order.run_id,  # each question is a run of its own
        public_start=begins_publicly(policy, plan, home.model(order.run)) is True,
        train_ids=train,
        test_ids=test,
    )
    forecast = PartyForecast(party=home.name, path=home.ledger, runs=0, limits=found)
    try:
        check_reaches_end([forecast], dataset=policy.data.dataset, rounds=rounds, way_out="[runs] until_limit = true")
    except PbmvflError as error:
        log.error("run=%s was refused: %s", order.run, error)
        raise PolicyError(
            f"run={order.run}: a limit of this site would end it before its plan does; plan with a smaller budget, or "
            "ask this site's owner"
        ) from error


def _write(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, sort_keys=True) + "\n", mode=PRIVATE_FILE)

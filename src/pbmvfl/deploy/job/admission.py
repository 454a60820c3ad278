"""Admission of jobs at a site: checked before any process of the job exists, and again by the process itself.

A refusal is public: it quotes the job spec's own values and what is permitted. Faults of the site itself (an unreadable
policy, a ledger in use, spent budget) go to the owner's log, and the answer only refers to that log.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError, safe_open

from pbmvfl._descriptors import POLL_INTERVAL
from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec, Work
from pbmvfl.deploy.site.policy_file import PolicyFile, own_ledger
from pbmvfl.errors import FederationError, ModelError, OrderError, PbmvflError, PolicyError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import PartyForecast, check_reaches_end
from pbmvfl.ledger.session_opening import Opening, SessionRows
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan

log = logging.getLogger(__name__)

#: The plan and run id that a run name stands for, and how often it was accepted.
BOUND = "bound.json"
#: Number of alignments at this party.
ALIGNMENTS_MADE = "alignments.json"
#: `federation.model_files.INDEX`; importing it would load torch into a process that only checks.
MODEL_INDEX = "part.json"
#: `federation.model_files.WEIGHTS_FILE`, and the flag in it that `protocol.party.weights_are_charged` reads, for the
#: same reason.
WEIGHTS_FILE, PUBLIC_START = "weights.safetensors", "run.public_start"
#: `federation.release_log`'s file, which the label holder's run folder has from its first session on.
RELEASES = "sessions.json"
#: Folder beside it with a party's stored answers.
ANSWERS = "answers"
#: Longest run that is forecast, which takes seconds. A longer run is ended by the limit itself when it is reached.
FORESEEN_ROUNDS = 50_000
#: Largest number of row ids that the site's long-lived process reads; a job's own process has no such bound.
FORESEEN_ROWS = 200_000
_LOCK = "admission.lock"
PRIVATE_REASON = "this site cannot take the order now; its operators find the reason in their log"

#: Reads the ids of a job's rows, as this party's ledger knows them: training rows, and predicted rows; None where there
#: are none.
RowIds = Callable[[SiteFolder, JobSpec], tuple[Sequence[str] | None, Sequence[str] | None]]


def admit(site_folder: SiteFolder, spec: JobSpec, now: datetime, *, row_ids: RowIds | None = None) -> None:
    """Refuse a job that this site does not accept.

    Args:
        site_folder: The site's folder.
        spec: The job spec.
        now: Current time by the site's own clock.
        row_ids: Reads the ids of the job's rows; with it a party forecasts its limits for exactly these rows.

    Raises:
        PolicyError: If the policy refuses the job, or the site cannot accept it now. The message is public.
        OrderError: If the job spec does not fit this site. The message is public.
    """
    with _redact_other_errors():
        _check_federation(site_folder, spec)
        check_members(site_folder)
        policy = PolicyFile.read(site_folder)
        _check_hours(policy, now)
        if spec.plan is not None:
            _check_evaluation(spec.plan)
        _check_run(site_folder, spec, most=policy.runs.sessions)
        if spec.work is Work.ALIGN:
            _check_alignments(site_folder, spec, policy)
            if site_folder.is_server:
                return
            with own_ledger(site_folder, policy):  # a party without a working ledger takes part in nothing
                return
        if not site_folder.alignment(spec.alignment).is_dir():
            raise OrderError(
                f"alignment={spec.alignment}: this site has no such rows; permitted: one that was made with "
                "`pbmvfl align`"
            )
        if spec.work is Work.PREDICT:
            _check_model(site_folder, spec)
        if site_folder.is_server:
            _check_labels(site_folder, spec, policy)
        else:
            _check_party(site_folder, spec, policy, row_ids)


def accept_job(site_folder: SiteFolder, spec: JobSpec, now: datetime, *, row_ids: RowIds | None = None) -> None:
    """Admit a job again, in the process that runs it, and record that this site accepted it.

    From then on the run's name stands for this plan and this run id, and an alignment is counted, whatever its result.

    Raises:
        PolicyError: As `admit`.
        OrderError: As `admit`.
    """
    # Two processes that count at the same time would count one.
    lock = FileLock(site_folder.path / _LOCK, mode=PRIVATE_FILE, poll_interval=POLL_INTERVAL)
    with _redact_other_errors(), lock:
        admit(site_folder, spec, now, row_ids=row_ids)
        if spec.work is Work.ALIGN:
            if not site_folder.is_server:
                made = _alignments_made(site_folder)
                _write(site_folder.path / ALIGNMENTS_MADE, {"made": made + 1})
        elif spec.work is Work.TRAIN:
            folder = site_folder.run(spec.run)
            make_private_folder(folder)
            known = _read_binding(folder)
            _write(folder / BOUND, {**_binding(spec), "taken_up": 1 if known is None else known["taken_up"] + 1})


def own_row_ids(
    site_folder: SiteFolder, spec: JobSpec, *, quick: bool = True
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """Return the ids of training rows and of predicted rows in the job's alignment; None where there are none.

    Args:
        site_folder: The party's folder.
        spec: The job spec.
        quick: Skip the digest check, which reads all rows once.
    """
    from pbmvfl.deploy.alignment.aligned_rows import AlignedRows

    ids = AlignedRows.load(site_folder.alignment(spec.alignment), quick=quick).ids
    return (None, ids) if spec.work is Work.PREDICT else (ids, None)


@contextlib.contextmanager
def _redact_other_errors() -> Iterator[None]:
    """Let public refusals through; log every other error, and refuse without its text."""
    try:
        yield
    except (PolicyError, OrderError):
        raise
    except (PbmvflError, OSError) as error:
        log.error("an order was refused: %s", error)
        raise PolicyError(PRIVATE_REASON) from error


# --- checks of every site ---


def _check_federation(site_folder: SiteFolder, spec: JobSpec) -> None:
    federation = site_folder.federation
    if spec.federation != federation.name:
        raise OrderError(f"federation={spec.federation}: this site is of federation {federation.name}")
    there = len(federation.parties)
    if spec.plan is not None and spec.plan.num_parties != there:
        raise OrderError(
            f"num_parties={spec.plan.num_parties}: federation {federation.name} has {there} parties; plan with so many"
        )


def check_members(site_folder: SiteFolder) -> None:
    """Refuse to work with an organisation whose identity was revoked.

    Raises:
        FederationError: If the revocation list is stale, older than one before, or not the authority's.
        PolicyError: If an organisation was revoked. The message is public.
    """
    revoked = site_folder.revocations()
    if revoked is None:
        return
    revoked.check_fresh()
    federation, pins = site_folder.federation, site_folder.pins()
    names = zip((federation.server, *federation.parties), (pins.server, *pins.parties), strict=True)
    if gone := [name for name, identity in names if identity in revoked.identities]:
        raise PolicyError(
            f"{', '.join(gone)} was revoked, by list {revoked.number} of the authority; remove it from federation.toml,"
            " or let it make new keys"
        )


def _check_hours(policy: PolicyFile, now: datetime) -> None:
    hours = policy.runs.hours
    if hours is not None and not hours.permit(now):
        raise PolicyError(f"time={now:%H:%M} at this site: the policy permits {hours}; submit it then")


def _check_evaluation(plan: Plan) -> None:
    """Refuse exact sums at every site, also the server: no role of a deployment may see them."""
    if plan.evaluation is Evaluation.SIMULATOR:
        raise PolicyError(
            "evaluation=simulator: nobody sees exact sums in a deployment; plan with evaluation=none or "
            "evaluation=released"
        )


# --- runs, by their names ---


def _binding(spec: JobSpec) -> dict[str, Any]:
    return {"run_id": spec.run_id, "plan": spec.run_plan.hash.hex(), "alignment": spec.alignment}


def _read_binding(folder: Path) -> dict[str, Any] | None:
    path = folder / BOUND
    if not path.exists():
        return None
    return read_object(path, {"run_id": str, "plan": str, "alignment": str, "taken_up": int}, FederationError)


def _check_run(site_folder: SiteFolder, spec: JobSpec, *, most: int) -> None:
    """Refuse a run name that stands for another plan or run id at this site."""
    if spec.work is Work.ALIGN:
        return
    known = _read_binding(site_folder.run(spec.run))
    if known is None:
        if spec.work is Work.PREDICT:
            raise OrderError(f"run={spec.run}: this site has trained no such run; permitted: one that it has")
        return
    if known["run_id"] != spec.run_id:
        raise OrderError(
            f"run={spec.run}, run_id={spec.run_id}: here that name stands for run_id={known['run_id']}; go on with "
            "that one, or choose another name"
        )
    if spec.work is Work.PREDICT:
        return
    for name, value in _binding(spec).items():
        if known[name] != value:
            raise OrderError(
                f"run={spec.run}: here that name was begun with another {name}; go on with that one, or choose "
                "another name"
            )
    if known["taken_up"] >= most:
        raise PolicyError(
            f"run={spec.run} was begun {known['taken_up']} times: the policy permits {most} sessions of a run; train "
            "under another name"
        )


def _check_model(site_folder: SiteFolder, spec: JobSpec) -> None:
    """Require this site's part of exactly the requested model."""
    path = site_folder.model(spec.run) / MODEL_INDEX
    if not path.is_file():
        raise OrderError(f"run={spec.run}: this site has no part of its model; train it to its end first")
    said = read_object(path, {"model": str}, ModelError)
    if said["model"] != spec.run_plan.model:
        raise OrderError(
            f"run={spec.run}: the order is about another model than the one that this site has of that run; train it, "
            "or predict with the model that is here"
        )


# --- alignments ---


def _alignments_made(site_folder: SiteFolder) -> int:
    path = site_folder.path / ALIGNMENTS_MADE
    made: int = read_object(path, {"made": int}, FederationError)["made"] if path.exists() else 0
    return made


def _check_alignments(site_folder: SiteFolder, spec: JobSpec, policy: PolicyFile) -> None:
    for folder in sorted((site_folder.path / "runs").glob("*")):
        known = _read_binding(folder)
        if known is None or known["alignment"] != spec.alignment:
            continue
        if _is_released(site_folder, folder, known["run_id"], policy):  # the run would resume with other rows
            raise OrderError(
                f"alignment={spec.alignment}: run={folder.name} was begun here with these rows; align under another "
                f"name: `pbmvfl align {free_alignment(site_folder, spec.alignment)}`"
            )
    if not site_folder.is_server and (made := _alignments_made(site_folder)) >= policy.runs.alignments:
        raise PolicyError(
            f"alignments={made} were made here: the policy permits {policy.runs.alignments}; use one that is there"
        )


def _is_released(site_folder: SiteFolder, run: Path, run_id: str, policy: PolicyFile) -> bool:
    """Return whether a run released anything: by a party's ledger, or by the label holder's log of releases."""
    if site_folder.is_server:
        return (run / RELEASES).exists()
    with own_ledger(site_folder, policy) as ledger:
        return any(entry.run == run_id for name in ledger.datasets() for entry in ledger.sessions(name))


def free_alignment(site_folder: SiteFolder, name: str) -> str:
    """Return the next name, such as people-2, that no alignment at this site has."""
    stem, _, number = name.rpartition("-")
    if not stem or not number.isdecimal():
        stem, number = name, "1"
    while site_folder.alignment(name := f"{stem}-{int(number) + 1}").exists():
        number = str(int(number) + 1)
    return name


# --- checks of the label holder ---


def _check_labels(site_folder: SiteFolder, spec: JobSpec, policy: PolicyFile) -> None:
    """Refuse a plan that shows more of labels than the policy permits; what a draw may spend is checked by the job."""
    policy.policy().check(spec.run_plan)
    if spec.run_plan.label_response is not None:
        with own_ledger(site_folder, policy) as ledger:
            _check_ledger(ledger)


def _check_ledger(ledger: Ledger) -> None:
    if (trouble := ledger.trouble()) is not None:
        raise FederationError(f"{ledger.path} {trouble}")


# --- checks of a party ---


def _check_party(site_folder: SiteFolder, spec: JobSpec, policy: PolicyFile, row_ids: RowIds | None) -> None:
    public_start = begins_publicly(policy, spec.run_plan, site_folder.model(spec.run))
    policy.policy().check(spec.run_plan, public_start=public_start)
    with own_ledger(site_folder, policy) as ledger:
        _check_ledger(ledger)
        begun = [entry for entry in ledger.sessions(policy.data.dataset) if entry.run == spec.run_id]
        if spec.work is Work.TRAIN and len(begun) >= policy.runs.sessions:
            raise PolicyError(
                f"run={spec.run} has had {len(begun)} sessions: the policy permits {policy.runs.sessions}; train "
                "under another name"
            )
        # A resumed run was forecast when it began, and the round at which it resumes is not known yet. Rows that were
        # predicted before get the same answer at no charge, and only the party itself knows which those are.
        resumes = bool(begun) if spec.work is Work.TRAIN else (site_folder.model(spec.run) / ANSWERS).is_dir()
        if row_ids is not None and not policy.runs.until_limit and not resumes:
            _look_ahead(site_folder, spec, policy.dataset, ledger, row_ids, public_start=public_start is True)


def begins_publicly(policy: PolicyFile, plan: Plan, part: Path | None = None) -> bool | None:
    """Return whether a session's first weights know rows only by what was charged; None where it is not known here.

    The job's own process checks again, with the networks themselves.

    Args:
        policy: The party's own policy.
        plan: The plan of the session.
        part: The folder of this party's part of the model that the plan predicts with.
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
        return False  # there is no evidence that they are charged


def _look_ahead(
    site_folder: SiteFolder, spec: JobSpec, dataset: str, ledger: Ledger, row_ids: RowIds, *, public_start: bool
) -> None:
    """Refuse a run that a limit would end early. By how much is private."""
    rounds = len(spec.run_plan.schedule)
    if rounds > FORESEEN_ROUNDS:
        return
    train, test = row_ids(site_folder, spec)
    opening = Opening(
        dataset=dataset,
        plan=spec.run_plan,
        rows=SessionRows(train_ids=train, test_ids=test),
        run="" if spec.work is Work.PREDICT else spec.run_id,  # each prediction is a run of its own
        public_start=public_start,
    )
    found = ledger.forecast(opening)
    forecast = PartyForecast(party=site_folder.name, path=site_folder.ledger, runs=0, limits=found)
    try:
        check_reaches_end([forecast], dataset=dataset, rounds=rounds, way_out="[runs] until_limit = true")
    except PbmvflError as error:
        log.error("run=%s was refused: %s", spec.run, error)
        raise PolicyError(
            f"run={spec.run}: a limit of this site would end it before its plan does; plan with a smaller budget, or "
            "ask this site's owner"
        ) from error


def _write(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, sort_keys=True) + "\n", mode=PRIVATE_FILE)

"""Public facts of a run that a page may show, each selected by its name, and what attacks and audits left there.

A run folder also names files of its owner, and a ledger has data about rows. A page shows only what is listed here;
`tests/report/test_page.py` checks that nothing else appears.
"""

from __future__ import annotations

import base64
import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pbmvfl._files import Kinds, checked_object, read_object
from pbmvfl._text import counted, for_json
from pbmvfl.errors import LedgerError, RunFolderError
from pbmvfl.federation.predictions import Asked, read_asked
from pbmvfl.federation.results import Result
from pbmvfl.federation.run_folder import NamedSource, RunFolder, RunSource
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import party_ledgers
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.table import PrivacyTable, privacy_table
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.epsilon_history import EpsilonPath, LimitPath, epsilon_paths, limit_paths, splits_apart
from pbmvfl.wire.traffic import Traffic

#: Files of the results, in a run folder or in the folder of --out.
ATTACK_FILE, AUDIT_FILE = "attack.json", "audit.json"
#: Picture of rows as attacks show them, beside the results.
GRID = "attack-grid.png"
_NUMBER = int | float


@dataclass(frozen=True, kw_only=True)
class ShownScore:
    """One score of an attack."""

    attack: str
    attacker: str
    setting: str
    measure: str
    value: float
    baseline: float
    bound: float | None
    bound_words: str
    is_alarm: bool


@dataclass(frozen=True, kw_only=True)
class ShownAttack:
    """Scores of all attacks, and for pictures how often a row is found: numbers alone, no row."""

    scores: tuple[ShownScore, ...] = ()
    #: (releases, share found) points by setting, among so many candidates.
    found: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)
    candidates: int = 1


@dataclass(frozen=True, kw_only=True)
class ShownAudit:
    """Verdict of an audit."""

    sound: bool
    tests: int
    false_alarm_rate: float
    alarms: list[str]


def read_attack(folder: Path) -> ShownAttack:
    """Return an attack's results; none if the folder has no such file.

    Raises:
        RunFolderError: The file is damaged.
    """
    path = folder / ATTACK_FILE
    if not path.is_file():
        return ShownAttack()
    written = read_object(path, {"scores": list}, RunFolderError)
    kinds = dict.fromkeys(("attack", "attacker", "setting", "measure", "bound_words"), str)
    types = {**kinds, "value": _NUMBER, "baseline": _NUMBER, "bound": _NUMBER | None, "is_alarm": bool}
    scores = [checked_object(score, types, path, RunFolderError) for score in written["scores"]]
    found: dict[str, Any] = {}
    if "found" in written:
        checked_object(written, {"found": dict, "candidates": int}, path, RunFolderError)
        for name, points in checked_object(written["found"], {}, path, RunFolderError).items():
            found[name] = [(float(x), float(y)) for x, y in points]
    return ShownAttack(
        scores=tuple(ShownScore(**{each.name: score[each.name] for each in fields(ShownScore)}) for score in scores),
        found=found,
        candidates=written.get("candidates", 1),
    )


def read_audit(folder: Path) -> ShownAudit | None:
    """Return an audit's verdict, or None if the folder has none.

    Raises:
        RunFolderError: The file is damaged.
    """
    path = folder / AUDIT_FILE
    if not path.is_file():
        return None
    types: Kinds = {"sound": bool, "tests": int, "false_alarm_rate": _NUMBER, "alarms": list}
    written = read_object(path, types, RunFolderError)
    return ShownAudit(**{name: written[name] for name in types})


def read_picture(path: Path) -> str | None:
    """Return a PNG file as a data URI, or None if there is none."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else None


# --- Facts of a run ---

#: Keys of result.json that a page repeats. Omitted are the reason for which a ledger ended a run, whose text has the
#: ledger's path, and the sessions, whose names could be used to look up rows in a party's ledger.
_SHOWN = (
    *("version", "metrics", "measured_on", "released", "majority", "classes", "positive_class", "largest_score"),
    *("scores", "diverged", "history", "traffic", "seconds", "row_uses", "noise_is_seeded", "public_start", "privacy"),
    *("plan", "plan_hash"),
)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Public facts of one run."""

    name: str
    data: str
    #: Day on which the run ended, such as 7 March 2026.
    date: str
    #: "name (columns)" of every party, for a user's table.
    parties: tuple[str, ...]
    result: Result
    delta: float
    #: (split, table) for each split that is charged separately; "" for any row.
    tables: tuple[tuple[str, PrivacyTable], ...]
    #: Epsilon of a row that is both trained on and predicted; None if the table covers it already.
    both: float | None
    paths: tuple[EpsilonPath, ...]
    limits: tuple[LimitPath, ...]
    #: True if the run has ledgers, and if any of them could be read.
    has_ledgers: bool
    reads_ledgers: bool
    npq: Traffic
    #: Values of result.json that a page repeats, unchanged.
    written: Mapping[str, Any]
    #: Description of the plan, as (title, text) pairs.
    plan_words: tuple[tuple[str, str], ...]
    #: Commands that repeat the run and inspect it.
    commands: tuple[tuple[str, str], ...]
    #: Predictions of the trained model since the run.
    asked: tuple[Asked, ...] = ()
    #: Results of `pbmvfl attack` and `pbmvfl audit` on this run.
    attack: ShownAttack = field(default_factory=ShownAttack)
    audit: ShownAudit | None = None
    #: Picture of rows as attacks show them, as a data URI; opt-in.
    picture: str | None = None

    @property
    def measured_on(self) -> str:
        """Source of the accuracy figures."""
        if self.result.plan.evaluation is Evaluation.SIMULATOR:
            found = self.result.measured_on
            return f"{found} of the simulator, which no role of the protocol sees; outside the epsilon"
        return f"{self.result.measured_on}, as the label holder sees them; inside the epsilon"

    @property
    def accuracy(self) -> float | None:
        """Test accuracy, or training accuracy if there are no test rows."""
        found = self.result.metrics
        return found.get("test_accuracy", found.get("train_accuracy"))

    def to_dict(self) -> dict[str, Any]:
        """Return every number on the page, for JSON."""
        return {
            "name": self.name,
            "data": self.data,
            "date": self.date,
            "parties": list(self.parties),
            "delta": self.delta,
            "result": for_json(dict(self.written)),
            "privacy_by_rows": {rows or "all": table.to_dicts() for rows, table in self.tables},
            "trained_on_and_predicted": for_json(self.both),
            "epsilon_over_rounds": [{**asdict(path), "points": for_json(path.points)} for path in self.paths],
            "limits": [
                {
                    "books": list(path.ledgers),
                    "limit": for_json(asdict(path.limit)),
                    "points": for_json(path.points),
                    "spent_now": for_json(path.spent_now),
                }
                for path in self.limits
            ],
            "traffic_predicted": self.result.plan.traffic().to_dict(),
            "traffic_npq": self.npq.to_dict(),
            "asked": [for_json(asdict(each)) for each in self.asked],
            **({"attacks": [for_json(asdict(each)) for each in self.attack.scores]} if self.attack.scores else {}),
            **({"audit": asdict(self.audit)} if self.audit else {}),
        }


def facts_of(
    folder: RunFolder,
    *,
    result: Result,
    written: Mapping[str, Any],
    plan_words: Sequence[tuple[str, str]],
    delta: float | None = None,
    show_rows: bool = False,
) -> RunFacts:
    """Return the facts that the page shows of a run.

    Args:
        folder: The run's folder.
        result: Its result.
        written: Its parsed result.json.
        plan_words: Its plan, as (title, text) pairs.
        delta: Of every epsilon; None for the run's own.
        show_rows: Whether to embed the picture of rows that `pbmvfl attack` drew.
    """
    source = folder.read_source()
    delta = source.delta if delta is None else delta
    run, known = result.training_run, result.noise_is_seeded
    apart = splits_apart(run)
    with _opened_ledgers(source) as ledgers:
        limits = limit_paths(ledgers, source.rows.name, result.sessions)
        reads = bool(ledgers)
    both = None
    if apart and not known:
        both = epsilon_bound(run.of_one_row(), Unit.CELL, Accounting.STRICT, delta=delta).epsilon
    name = folder.path.resolve().name
    ended = datetime.fromtimestamp((folder.path / "result.json").stat().st_mtime, tz=UTC)
    return RunFacts(
        name=name,
        data=source.rows.name,
        date=f"{ended.day} {ended:%B %Y}",
        parties=_parties(source),
        result=result,
        delta=delta,
        tables=tuple(
            (rows, privacy_table(run.of_split(rows) if rows else run, delta=delta, noise_is_known=known))
            for rows in apart or ("",)
        ),
        both=both,
        paths=epsilon_paths(result, delta=delta),
        limits=limits,
        has_ledgers=source.ledger is not None,
        reads_ledgers=reads,
        npq=npq_traffic(result.plan),
        asked=read_asked(folder.path),
        attack=read_attack(folder.path),
        audit=read_audit(folder.path),
        picture=read_picture(folder.path / GRID) if show_rows else None,
        written={key: written[key] for key in _SHOWN if key in written},
        plan_words=tuple(plan_words),
        commands=tuple(commands(name, can_predict=folder.model.is_dir() and bool(result.plan.num_test_samples))),
    )


def _parties(source: RunSource) -> tuple[str, ...]:
    from pbmvfl.data.column_rules import parse_columns

    if isinstance(source.rows, NamedSource):
        return ()
    if source.rows.columns is None:  # each party's file determines its columns
        return tuple(source.rows.data) if isinstance(source.rows.data, dict) else ()
    held = parse_columns(source.rows.columns, may_share=True)
    return tuple(f"{name} ({counted(len(names), 'column')})" for name, names in held.items())


@contextlib.contextmanager
def _opened_ledgers(source: RunSource) -> Iterator[list[tuple[str, Ledger]]]:
    """Open the parties' ledgers that can be read, by owner or file name; a page needs none of them."""
    with contextlib.ExitStack() as opened:
        found = []
        for path in [] if source.ledger is None else party_ledgers(Path(source.ledger)):
            with contextlib.suppress(LedgerError, OSError):
                ledger = opened.enter_context(contextlib.closing(Ledger(path, read_only=True)))
                found.append((ledger.owner or path.stem, ledger))
        yield found


# --- Bytes ---


def npq_traffic(plan: Plan) -> Traffic:
    """Return the traffic of the paper's NPQ baseline: no privacy and no quantisation.

    It makes as many passes in joint rounds, and sends embeddings and gradients as 32-bit numbers in the same messages.
    Runs with local training are compared with it too.
    """
    return Plan.of(
        num_parties=plan.num_parties,
        num_samples=plan.num_samples,
        num_test_samples=plan.num_test_samples,
        num_classes=plan.num_classes,
        mechanism="none",
        embedding_dim=plan.embedding_dim,
        num_epochs=max(1, plan.num_epochs),
        batch_size=plan.batch_size,
        gradient_codec="float32",
        evaluation=plan.evaluation,
    ).traffic()


# --- Commands ---


def commands(name: str, *, can_predict: bool) -> Iterator[tuple[str, str]]:
    """Yield (description, command) pairs that can be pasted in the folder that holds the run's folder."""
    run = shlex.quote(f"./{name}" if name.startswith("-") else name)
    yield "Train the same plan on the same rows again, with new noise and new charges", f"pbmvfl train {run}"
    if can_predict:
        yield "What the label holder sees of the test rows: one charged release of each", f"pbmvfl evaluate {run}"
    yield "What it spent, for every unit and adversary", f"pbmvfl privacy {run}"
    yield "This page", f"pbmvfl report {run}"

"""Public facts of a run that a page may show, each selected by its name.

A run folder also names files of its owner, and a ledger has data about rows. A page shows only what is listed here;
`tests/report/test_page.py` checks that nothing else appears.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pbmvfl._text import counted
from pbmvfl.errors import LedgerError
from pbmvfl.federation.prediction_log import Asked, read_asked
from pbmvfl.federation.results import Result
from pbmvfl.federation.run_folder import Files, NamedSource, RunFolder, RunSource, TableSource
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import party_ledgers
from pbmvfl.plan.groups import Algorithm, Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.table import PrivacyTable, privacy_table
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.attack_section import ATTACK_FILE, ShownScore, read_scores
from pbmvfl.report.epsilon_history import EpsilonPath, LimitPath, epsilon_paths, limit_paths, splits_apart
from pbmvfl.wire.traffic import Traffic

#: Keys of result.json that a page repeats. Omitted are the reason for which a ledger ended a run, whose text has the
#: ledger's path, and the sessions, whose names could be used to look up rows in a party's ledger.
_SHOWN = (
    *("version", "metrics", "measured_on", "released", "majority", "classes", "positive_class", "largest_score"),
    *("diverged", "history", "traffic", "seconds", "row_uses", "noise_is_seeded", "public_start", "privacy"),
    *("plan", "plan_hash"),
)


@dataclass(frozen=True, kw_only=True)
class NoiseLine:
    """Noise and the largest value that it is added to, in the same units."""

    what: str
    noise: float
    signal: float
    words: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Public facts of one run."""

    name: str
    data: str
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
    noise: tuple[NoiseLine, ...]
    #: Values of result.json that a page repeats, unchanged.
    written: Mapping[str, Any]
    #: Description of the plan, as (title, text) pairs.
    plan_words: tuple[tuple[str, str], ...]
    #: Commands that repeat the run and inspect it.
    commands: tuple[tuple[str, str], ...]
    #: Predictions of the trained model since the run.
    asked: tuple[Asked, ...] = ()
    #: Scores of `pbmvfl attack` on this run; empty if there are none.
    attacks: tuple[ShownScore, ...] = ()

    @property
    def headline(self) -> tuple[str, float, float]:
        """Split, epsilon and advantage: cell level, strict, against the server; training rows if charged separately."""
        rows, table = self.tables[0]
        bound = table.bound(Unit.CELL, Accounting.STRICT)
        return rows, bound.epsilon, bound.advantage_upper_bound

    @property
    def measured_on(self) -> str:
        """Source of the accuracy figures."""
        if self.result.plan.evaluation is Evaluation.SIMULATOR:
            return "exact sums of the simulator, which no role of the protocol sees; outside the epsilon"
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
            "parties": list(self.parties),
            "delta": self.delta,
            "result": _number(dict(self.written)),
            "privacy_by_rows": {rows or "all": table.to_dicts() for rows, table in self.tables},
            "trained_on_and_predicted": _number(self.both),
            "epsilon_over_rounds": [{**asdict(path), "points": _number(path.points)} for path in self.paths],
            "limits": [
                {
                    "books": list(path.books),
                    "limit": _number(asdict(path.limit)),
                    "points": _number(path.points),
                    "spent_now": _number(path.spent_now),
                }
                for path in self.limits
            ],
            "traffic_predicted": self.result.plan.traffic().to_dict(),
            "traffic_npq": self.npq.to_dict(),
            "noise": [asdict(line) for line in self.noise],
            "asked": [_number(asdict(each)) for each in self.asked],
            **({"attacks": [_number(asdict(each)) for each in self.attacks]} if self.attacks else {}),
        }


def _number(value: Any) -> Any:
    """Replace non-finite numbers by strings at any depth, because JSON has none."""
    if isinstance(value, dict):
        return {name: _number(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_number(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def facts_of(
    folder: RunFolder,
    *,
    result: Result,
    written: Mapping[str, Any],
    plan_words: Sequence[tuple[str, str]],
    delta: float | None = None,
) -> RunFacts:
    """Return the facts that the page shows of a run; `written` is its parsed result.json."""
    source = folder.read_source()
    delta = source.delta if delta is None else delta
    run, known = result.training_run, result.noise_is_seeded
    apart = splits_apart(run)
    with _books(source) as books:
        limits = limit_paths(books, data_name(source), result.sessions)
        reads = bool(books)
    both = None
    if apart and not known:
        both = epsilon_bound(run.of_one_row(), Unit.CELL, Accounting.STRICT, delta=delta).epsilon
    name = folder.path.resolve().name
    return RunFacts(
        name=name,
        data=data_name(source),
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
        noise=tuple(noise_lines(result.plan)),
        asked=read_asked(folder.path),
        attacks=read_scores(folder.path / ATTACK_FILE),
        written={key: written[key] for key in _SHOWN if key in written},
        plan_words=tuple(plan_words),
        commands=tuple(commands(name, source, has_model=folder.model.is_dir())),
    )


def data_name(source: RunSource) -> str:
    """Return the dataset's name in the ledgers, which is never a path."""
    return source.rows.dataset if isinstance(source.rows, NamedSource) else source.rows.name


def _parties(source: RunSource) -> tuple[str, ...]:
    from pbmvfl.data.column_rules import parse_columns

    if isinstance(source.rows, NamedSource):
        return ()
    if source.rows.columns is None:  # each party's file determines its columns
        return tuple(source.rows.data) if isinstance(source.rows.data, dict) else ()
    held = parse_columns(source.rows.columns, may_share=True)
    return tuple(f"{name} ({counted(len(names), 'column')})" for name, names in held.items())


@contextlib.contextmanager
def _books(source: RunSource) -> Iterator[list[tuple[str, Ledger]]]:
    """Open the parties' ledgers that can be read, by owner or file name; a page needs none of them."""
    with contextlib.ExitStack() as opened:
        found = []
        for path in [] if source.ledger is None else party_ledgers(Path(source.ledger)):
            with contextlib.suppress(LedgerError, OSError):
                book = opened.enter_context(contextlib.closing(Ledger(path, read_only=True)))
                found.append((book.owner or path.stem, book))
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


# --- Noise ---


def noise_lines(plan: Plan) -> Iterator[NoiseLine]:
    """Yield the standard deviation of each kind of noise beside the largest value that it is added to."""
    kinds = plan.schedule.kinds
    if plan.algorithm is Algorithm.PBM and any(kind.trains for kind in kinds):
        rows = min(plan.batch_size, plan.num_samples)
        yield from _release_line("a sum of embeddings, in training", plan, plan.release.variance_upper_bound, rows)
    if plan.noise_multiplier:
        rows = plan.schedule.num_rows(max(0, plan.schedule.trained_at - 1))
        yield NoiseLine(
            what="a step of a party's weights",
            noise=plan.noise_multiplier * plan.clip_norm,
            signal=rows * plan.clip_norm,
            words=f"gradients of {rows:,} rows, each clipped to {plan.clip_norm:g}, against the noise on their sum",
        )
    for kind in kinds:
        if kind.releases and not kind.trains:
            mechanism = plan.mechanism_for(kind)
            deviation = mechanism.variance_upper_bound**0.5
            if deviation:
                yield NoiseLine(
                    what="a prediction" if kind.name == "prediction" else f"{kind.name} of a row",
                    noise=deviation,
                    signal=plan.num_parties * mechanism.bound,
                    words=f"{mechanism.describe()}: added up over {plan.num_parties} parties, against the noise on it",
                )


def _release_line(what: str, plan: Plan, variance: float, rows: int) -> Iterator[NoiseLine]:
    if variance:
        yield NoiseLine(
            what=what,
            noise=variance**0.5,
            signal=plan.num_parties * plan.bound,
            words=(
                f"{plan.release.describe()}: a row, added up over {plan.num_parties} parties, against the noise on it; "
                f"the mean over a batch of {rows:,} has {variance**0.5 / rows**0.5:.3g}"
            ),
        )


# --- Commands ---


def commands(name: str, source: RunSource, *, has_model: bool) -> Iterator[tuple[str, str]]:
    """Yield (description, command) pairs; files are named without their folders."""
    yield "Train the same plan again, with new noise; its releases are charged again", _train_again(name, source)
    if has_model:
        yield _ask(name, source)
    yield "What it spent, for every unit and adversary", f"pbmvfl privacy {_quoted(name)}"
    if source.ledger is not None:
        yield "What the parties' books have, over all runs", "pbmvfl ledger show LEDGERS"
    yield "This page", f"pbmvfl report {_quoted(name)}"


def _ask(name: str, source: RunSource) -> tuple[str, str]:
    rows = source.rows
    if isinstance(rows, NamedSource):
        return (
            "What the label holder sees of its test rows, one charged release of each",
            f"pbmvfl evaluate {_quoted(name)}",
        )
    new = [f"{party}=NEW.csv" for party in rows.data] if isinstance(rows.data, dict) else ["NEW.csv"]
    words = ["pbmvfl", "predict", name, *(word for file in new for word in ("--data", file))]
    words += [] if rows.id is None else ["--id", rows.id]
    return "Predict new rows, one charged release of each", " ".join(map(_quoted, words))


def _train_again(name: str, source: RunSource) -> str:
    rows = source.rows
    words = ["pbmvfl", "train"]
    words += [rows.dataset] if isinstance(rows, NamedSource) else list(_table_options(rows))
    words += ["--plan", f"{name}/plan.json", "--delta", f"{source.delta!r}"]
    return " ".join(map(_quoted, words)) + (" --ledger LEDGERS" if source.ledger is not None else "")


def _table_options(rows: TableSource) -> Iterator[str]:
    for option in ("data", "test_data", "label_data", "schema"):
        files: Files | None = getattr(rows, option)
        for party, file in files.items() if isinstance(files, dict) else [("", files)]:
            if file is not None:
                yield from (f"--{option.replace('_', '-')}", (f"{party}=" if party else "") + Path(file).name)
    for option in ("label", "columns", "id", "dataset_name"):
        if (value := getattr(rows, option)) is not None:
            yield from (f"--{option.replace('_', '-')}", value)
    if rows.test_data is None:
        yield from ("--test-fraction", f"{rows.test_fraction!r}")


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)

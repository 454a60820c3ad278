"""What a person sees of a result: every figure with what it was measured on, and what was spent."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from pbmvfl._text import counted
from pbmvfl.cli.tables import plain_table, print_notes, print_privacy_of_rows
from pbmvfl.federation.results import EXACT, Result
from pbmvfl.privacy.accounting import NOT_A_PROOF, EpsilonBound, TrainingRun, epsilon_bound
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.wire.traffic import human_bytes

_EXACT, _NOISY = "exact sums, simulator only", "noisy sums, as the server saw"
_UNMEASURED = "-"
NEEDS_A_RELEASE = f"{_UNMEASURED} not measured, needs a release (--prediction-epsilon E, or pbmvfl evaluate RUN)"


def print_result(console: Console, result: Result, *, delta: float, is_news: bool) -> None:
    """Metrics, costs, and notes. `is_news` if the epsilons are not those of a table that was printed before."""
    if result.metrics:
        _print_metrics(console, result)
    traffic = result.traffic
    console.print(
        f"{counted(traffic.rounds, 'round')} in {result.seconds:.1f} s; measured {human_bytes(traffic.bytes_up)} up, "
        f"{human_bytes(traffic.bytes_down)} down, {human_bytes(traffic.bytes_setup)} set-up"
    )
    run, known = result.training_run, result.noise_is_seeded
    if is_news or known or run != result.plan.training_run():
        title = "epsilon that was spent"
        print_privacy_of_rows(console, run, delta=delta, title=title, legend=False, noise_is_known=known)
    else:
        console.print(f"spent: {spent(run, delta=delta)}, as planned", markup=False)
    said_below = {*result.warnings, *(note for note in result.notes if result.diverged and result.stopped in note)}
    print_notes(console, [note for note in result.notes if note not in said_below])
    print_notes(console, result.warnings, kind="warning")
    if result.diverged:
        console.print("[bold red]diverged:[/]", end=" ")
        console.print(result.stopped, markup=False)


def _print_metrics(console: Console, result: Result) -> None:
    names = ["train_accuracy", "test_accuracy"]
    if result.plan.num_classes == 2:
        names += ["train_auprc", "test_auprc"]
    table = plain_table("measured on", *(name.replace("_", "\n").replace("auprc", "AUPRC") for name in names))
    if result.measured_on == EXACT:
        table.add_row(_EXACT, *_cells(names, result.metrics))
    released = _cells(names, result.released)
    table.add_row(_NOISY, *released)
    if result.classes:
        commonest = dict.fromkeys(each.name for each in result.majority.values())
        rates: dict[str, float] = {f"{split}_accuracy": each.rate for split, each in result.majority.items()}
        rates |= _shares_of_positive(result)
        said = ", ".join(map(repr, commonest))
        table.add_row(f"majority rate, {said}", *_cells(names, rates, missing=""))
    console.print(table)
    if _UNMEASURED in released and result.measured_on == EXACT:
        console.print(NEEDS_A_RELEASE, style="dim", markup=False)
    if result.positive_class is not None:
        console.print(f"AUPRC: the positive class is {result.positive_class!r}", style="dim", markup=False)


def _cells(names: list[str], metrics: Mapping[str, float], *, missing: str = _UNMEASURED) -> list[str]:
    return [f"{metrics[name]:.4f}" if name in metrics else missing for name in names]


def _shares_of_positive(result: Result) -> dict[str, float]:
    """What scores that are the same for all rows get."""
    if result.positive_class is None:
        return {}
    negative, positive = result.classes
    counts = {"train": (negative.train, positive.train), "test": (negative.test, positive.test)}
    return {f"{split}_auprc": b / (a + b) for split, (a, b) in counts.items() if a + b}


# --- what was spent, in one line ---


def spent(run: TrainingRun, *, delta: float) -> str:
    """The epsilons that a plan is chosen by, against the server."""
    if not run.charges_by_split:
        paper, strict = (epsilon_bound(run, Unit.CELL, each, delta=delta) for each in Accounting)
        star = " (* not a proof)" if NOT_A_PROOF in paper.conditions else ""
        return f"epsilon {_named(paper)}, {_named(strict)} at delta {delta:g}{star}"
    if len(run.splits) > 1:
        rows = {"train": "training", "test": "predicted"}
        each = (
            f"{format_epsilon(epsilon_bound(run.of_split(split), Unit.CELL, Accounting.STRICT, delta=delta).epsilon)} "
            f"of {rows.get(split, split)} rows"
            for split in run.splits
        )
        return f"epsilon {', '.join(each)} (cell, strict, server) at delta {delta:g}"
    units = (epsilon_bound(run, unit, Accounting.STRICT, delta=delta) for unit in (Unit.CELL, Unit.RECORD))
    return f"epsilon {', '.join(_named(bound) for bound in units)} at delta {delta:g}"


def _named(bound: EpsilonBound) -> str:
    star = " *" if NOT_A_PROOF in bound.conditions else ""
    return f"{format_epsilon(bound.epsilon)} ({bound.unit}, {bound.accounting}{star}, {bound.adversary})"

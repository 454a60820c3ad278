"""Plans and results as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from pbmvfl._text import counted
from pbmvfl.cli.tables import plain_table, print_notes, print_privacy_of_rows
from pbmvfl.federation.results import EXACT, SIMULATED, Result
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import Algorithm, Evaluation, FeatureMap, PreparationName
from pbmvfl.plan.local_search import dense_columns
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import USUAL_EPSILON
from pbmvfl.privacy.accounting import NOT_A_PROOF, EpsilonBound, TrainingRun, epsilon_bound
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.wire.traffic import human_bytes

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset


# --- Results: every figure with the rows it was measured on, and the privacy budget spent ---


_UNMEASURED = "-"


def print_result(console: Console, result: Result, *, delta: float, is_news: bool) -> None:
    """Print metrics, costs and notes; `is_news` if the epsilons differ from the table printed before the run."""
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
    if result.measured_on in (EXACT, SIMULATED):
        table.add_row(f"{result.measured_on}, simulator only", *_cells(names, result.metrics))
    released = _cells(names, result.released)
    if result.released:
        readings = dict.fromkeys(mechanism.reading for mechanism in result.plan.releases)
        table.add_row(f"{', '.join(readings)}, as the server saw", *released)
    if result.classes:
        commonest = dict.fromkeys(each.name for each in result.majority.values())
        rates: dict[str, float] = {f"{split}_accuracy": each.rate for split, each in result.majority.items()}
        rates |= _shares_of_positive(result)
        said = ", ".join(map(repr, commonest))
        table.add_row(f"majority rate, {said}", *_cells(names, rates, missing=""))
    console.print(table)
    if result.fusion is not None:
        console.print(f"fusion model: {result.fusion.description}", markup=False)
    if _UNMEASURED in released and result.measured_on in (EXACT, SIMULATED):
        what = _UNMEASURED if result.released else "what the server sees of predictions:"
        console.print(f"{what} not measured, needs a release ({_ways_to_release(result.plan)})", style="dim")
    if result.positive_class is not None:
        console.print(f"AUPRC: the positive class is {result.positive_class!r}", style="dim", markup=False)


def _ways_to_release(plan: Plan) -> str:
    in_training = "--prediction-epsilon E, or " if plan.algorithm is Algorithm.STAGED else ""
    return f"{in_training}pbmvfl evaluate RUN"


def _cells(names: list[str], metrics: Mapping[str, float], *, missing: str = _UNMEASURED) -> list[str]:
    return [f"{metrics[name]:.4f}" if name in metrics else missing for name in names]


def _shares_of_positive(result: Result) -> dict[str, float]:
    """Return the AUPRC of constant scores: the share of the positive class in each split."""
    if result.positive_class is None:
        return {}
    negative, positive = result.classes
    counts = {"train": (negative.train, positive.train), "test": (negative.test, positive.test)}
    return {f"{split}_auprc": b / (a + b) for split, (a, b) in counts.items() if a + b}


# --- Privacy budget spent, in one line ---


def spent(run: TrainingRun, *, delta: float) -> str:
    """Describe in one line the epsilons against the server."""
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


# --- A plan in a few lines for a terminal ---


def describe_plan(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for each line."""
    yield "algorithm", describe_algorithm(plan)
    if plan.algorithm is Algorithm.STAGED:
        yield "training", _local(plan)
        yield "noise", _noise(plan)
    else:
        yield "mechanism", _released(plan.release)
        yield from _deviation(plan)
        yield "training", _steps(plan)
    yield from _prediction(plan)
    traffic = plan.traffic()
    down = human_bytes(traffic.bytes_down)
    gradient = f" ({plan.gradient_codec} gradient)" if plan.algorithm is Algorithm.PBM else ""
    labels = f", labels {human_bytes(traffic.bytes_setup)} with the handshake" if plan.sends_labels else ""
    yield "bytes", f"{human_bytes(traffic.bytes_up)} up, {down} down{gradient}{labels}"


def describe_algorithm(plan: Plan) -> str:
    """Return the name of a plan's algorithm and, in one clause, what its rounds do."""
    if plan.algorithm is Algorithm.STAGED:
        if plan.num_fusion_samples:
            rows = f"{plan.num_network_samples:,} rows train every party alone, {plan.num_fusion_samples:,} fusion rows"
            return f"{plan.algorithm}: {rows} are released once"
        return f"{plan.algorithm}: every party trains alone; each row that is predicted is released once"
    other = "" if plan.mechanism == plan.algorithm else f" with mechanism {plan.mechanism}"
    return f"{plan.algorithm}{other}: joint rounds, each a release of its rows and one gradient back"


def describe_widths(data: VerticalDataset) -> str:
    """Describe how many columns parties have, and how many numbers they become where words or gaps take more."""
    numbers = [dense_columns(part.shape[1:]) for part in data.train_features]
    held = numbers if data.columns is None else [len(part.rules) for part in data.columns]
    return _from_to(held, "column") + ("" if numbers == held else f", as {_from_to(numbers, 'number')}")


def _from_to(counts: list[int], name: str) -> str:
    least, most = min(counts), max(counts)
    return counted(most, name) if least == most else f"{least:,} to {counted(most, name)}"


def coupling_notes(plan: Plan) -> list[str]:
    """Return a note if a row's embedding depends on other rows of its batch."""
    if not plan.couples_rows:
        return []
    return [
        f"encoder {plan.encoder} normalises over the batch, so an embedding depends on every row of its batch; each "
        "use of a row is therefore charged as its whole batch, which makes a row's epsilon large"
    ]


def _released(release: Mechanism) -> str:
    values = counted(release.embedding_dim, "value")
    return f"{release.describe()}, embeddings of {values} in [-{release.bound:g}, {release.bound:g}]"


def _deviation(plan: Plan) -> Iterator[tuple[str, str]]:
    noise = plan.release.variance_upper_bound**0.5
    if noise:
        widest = plan.num_parties * plan.bound
        yield "noise", f"standard deviation {noise:.3g} on sums within [-{widest:g}, {widest:g}]"


def _steps(plan: Plan) -> str:
    kind = next(phase.kind for phase in plan.rounds.phases if phase.kind.trains)
    rounds = plan.schedule.rounds_per_pass(kind)
    each = "of all rows" if rounds == 1 else f"of {counted(rounds, 'round')}, {counted(plan.batch_size, 'row')} each"
    return f"{counted(plan.num_epochs, 'epoch')} {each}, {plan.optimizer} {plan.learning_rate:g}"


def _local(plan: Plan) -> str:
    seen = {
        FeatureMap.COLUMNS: "own columns",
        FeatureMap.PAIRS: "own columns and their products",
        FeatureMap.VALUES: "the values of own columns and of every two together",
        FeatureMap.SHAPES: f"shapes of own columns ({plan.shapes.replace(';', '; ')})",
    }[plan.features]
    prepared = ", whitened" if plan.preparation is PreparationName.WHITEN else ""
    rows = f"of {plan.num_network_samples:,} rows; " if plan.num_fusion_samples else ""
    return f"on {seen}{prepared}; {rows}nothing leaves a party; {_steps(plan)}"


def _noise(plan: Plan) -> str:
    if not plan.noise_multiplier:
        return "none"
    rows = plan.schedule.num_rows(plan.schedule.trained_at - 1)
    share = plan.noise_multiplier / rows
    return f"{plan.noise_multiplier:.4g} times what one row may add to a step, {share:.2g} of what all {rows:,} may add"


def _prediction(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.num_fusion_samples:
        law = (plan.prediction or plan.release).describe()
        yield (
            "fusion rows",
            f"{plan.num_fusion_samples:,} of {plan.num_samples:,} rows train no network: each is released once "
            f"({law}{_of_votes(plan)}) and teaches the fusion model ({plan.fusion}), which stays with the label holder",
        )
    if plan.evaluation is not Evaluation.RELEASED:
        if plan.evaluation is Evaluation.NONE:
            yield "predictions", "none in training: nothing is measured"
        else:
            seen = "simulated releases" if plan.num_fusion_samples else "exact sums"
            yield "predictions", f"{seen}, which only the simulator sees; outside the epsilon"
        if plan.prediction is not None:
            yield "later rows", f"{plan.prediction.describe()}{_of_votes(plan)}, when the trained model predicts"
        elif plan.algorithm is Algorithm.STAGED:
            yield "later rows", f"epsilon {USUAL_EPSILON:g} for a cell of each, or what `pbmvfl predict --epsilon` says"
        return
    release = plan.prediction or plan.release
    yield "predictions", f"{release.describe()}{_of_votes(plan)}, one release a test row"


def _of_votes(plan: Plan) -> str:
    return "" if plan.vote.kind is VoteKind.RAW else f" of every party's vote ({plan.vote.kind})"

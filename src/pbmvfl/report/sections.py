"""Sections of a run's page, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pbmvfl._text import counted
from pbmvfl.plan.groups import Algorithm, Evaluation
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.attack_section import attack_section
from pbmvfl.report.charts import Bar, Level, Series, bar_chart, line_chart, share_chart
from pbmvfl.report.facts import RunFacts
from pbmvfl.report.markup import Child, Markup, el, facts_table, joined, sentence
from pbmvfl.report.privacy_sections import privacy_section, rounds_section
from pbmvfl.wire.traffic import Traffic, human_bytes

#: Classes shown on the page; result.json has all of them.
_MOST_CLASSES = 30


def sections(facts: RunFacts, prefix: str) -> Iterator[tuple[str, str, Markup]]:
    """Yield (anchor, title, content) for each section."""
    yield f"{prefix}trained", "What was trained", _trained(facts)
    yield f"{prefix}privacy", "What it tells about anybody", privacy_section(facts)
    yield f"{prefix}rounds", "Epsilon over the rounds", rounds_section(facts)
    yield f"{prefix}accuracy", "Accuracy and loss", _accuracy(facts)
    if facts.asked:
        yield f"{prefix}asked", "Asked since", _asked(facts)
    if facts.attacks:
        yield f"{prefix}attacks", "What an attacker got", attack_section(facts.attacks)
    yield f"{prefix}bytes", "Bytes", _bytes(facts)
    if facts.noise:
        yield f"{prefix}noise", "Noise against signal", _noise(facts)
    yield f"{prefix}again", "Do it again", _again(facts)


# --- Summary ---


def summary(facts: RunFacts) -> Markup:
    """Return one sentence, the warnings and the main numbers."""
    plan = facts.result.plan
    test = f"; {counted(plan.num_test_samples, 'row')} to test" if plan.num_test_samples else ""
    lede = (
        f"{counted(plan.num_parties, 'party', 'parties')} with different columns of the same "
        f"{counted(plan.num_samples, 'row')} of {facts.data} trained one model for "
        f"{counted(plan.num_classes, 'class', 'classes')}{test}."
    )
    return joined(el("p", lede), *(el("p", text, class_="warn") for text in warnings(facts)), _tiles(facts))


def warnings(facts: RunFacts) -> Iterator[str]:
    """Yield the conditions that change the meaning of the numbers below."""
    result = facts.result
    if result.noise_is_seeded:
        yield "The noise was seeded for a test: somebody knows it, and no epsilon holds."
    if result.diverged:
        yield "The loss went astray, which ended the run: the figures are of a model that did not learn."
    elif result.stopped:
        done = counted(sum(each.charged_until - each.first_round for each in result.sessions), "round")
        yield f"A party's ledger ended this run early: {done} of {len(result.plan.schedule):,} were sent."
    if len(result.sessions) > 1:
        yield (
            f"The run was resumed and has {len(result.sessions)} sessions. Rounds that ran again are further releases, "
            "and are counted."
        )


def _tiles(facts: RunFacts) -> Markup:
    result = facts.result
    rows, epsilon, advantage = facts.headline
    whose = {"": "a cell", "train": "a cell that was trained on", "test": "a cell that was predicted"}[rows]
    tiles = [
        _tile(
            format_epsilon(epsilon),
            f"epsilon of {whose}",
            f"strict, from the server, delta {facts.delta:g}{_paper(facts)}",
        ),
        _tile(
            f"{math.ceil(50 + 50 * advantage)} of 100",
            "right guesses of the best attack, at most",
            "whether a cell is the true one or another; 50 is blind guessing",
        ),
    ]
    found = result.metrics
    split = "test" if "test_accuracy" in found else "train"
    source = "exact sums, outside the epsilon" if _is_exact(facts) else f"by {result.measured_on}, released"
    if facts.accuracy is None:
        tiles.append(_tile("not measured", f"{split} accuracy", "it needs a release"))
    else:
        tiles.append(_tile(f"{facts.accuracy:.4f}", f"{split} accuracy", source))
    if (rate := majority_rate(facts, split)) is not None:
        tiles.append(_tile(f"{rate:.4f}", "majority rate", f"always naming the commonest class of {split} rows"))
    tiles.append(
        _tile(
            human_bytes(result.traffic.total),
            "moved between all parties and the server",
            f"{counted(result.traffic.rounds, 'round')} in {result.seconds:.1f} s",
        )
    )
    return el("div", *tiles, class_="tiles")


def _paper(facts: RunFacts) -> str:
    """Describe the epsilon by the paper's count, or return "" without joint rounds."""
    if not facts.result.training_run.has_joint_rounds:
        return ""
    epsilon = facts.tables[0][1].bound(Unit.CELL, Accounting.PAPER).epsilon
    return f"; {format_epsilon(epsilon)} as the paper counts, which is not a proof"


def _tile(value: str, what: str, more: str) -> Markup:
    return el("div", el("b", value), el("span", what, class_="what"), el("span", more), class_="tile")


def _is_exact(facts: RunFacts) -> bool:
    return facts.result.plan.evaluation is Evaluation.SIMULATOR


def majority_rate(facts: RunFacts, split: str) -> float | None:
    """Return the share of the most frequent class, or None if the result lacks it."""
    found = facts.result.majority.get(split)
    return None if found is None else found.rate


# --- Training ---


def _trained(facts: RunFacts) -> Markup:
    plan = facts.result.plan
    rows: list[tuple[str, Child]] = [
        ("data", facts.data),
        ("rows", f"{plan.num_samples:,} to train, {plan.num_test_samples:,} to test"),
        ("parties", ", ".join(facts.parties) if facts.parties else f"{plan.num_parties}"),
        ("classes", _classes(facts)),
        *facts.plan_words,
        ("public seed", f"{plan.seed}: order of rows and first weights; never the noise"),
        ("plan", el("code", facts.result.plan.hash.hex()[:16], class_="small")),
    ]
    return facts_table(rows)


def _classes(facts: RunFacts) -> str:
    classes, positive = facts.result.classes, facts.result.positive_class
    if not classes:
        return f"{facts.result.plan.num_classes}"
    names = ", ".join(each.name for each in classes[:_MOST_CLASSES])
    more = ", ..." if len(classes) > _MOST_CLASSES else ""
    said = "" if positive is None else f"; AUPRC is of {positive}"
    return f"{len(classes)}: {names}{more}{said}"


# --- Accuracy ---

#: Columns: name in the history, label, colour, dashed.
_LINES = (
    ("test_accuracy", "test accuracy", 1, False),
    ("train_accuracy", "train accuracy", 0, False),
    ("test_auprc", "test AUPRC", 1, True),
    ("train_auprc", "train AUPRC", 0, True),
    ("released_train_accuracy", "train accuracy, as the server saw it", 3, False),
    ("released_train_auprc", "train AUPRC, as the server saw it", 3, True),
)


def _accuracy(facts: RunFacts) -> Markup:
    result = facts.result
    history = facts.written.get("history", [])
    scores = [
        Series(name=title, points=points, colour=colour, dashed=dashed, last=f"{points[-1][1]:.4f}")
        for name, title, colour, dashed in _LINES
        if (points := [(line["epoch"], line[name]) for line in history if name in line])
    ]
    losses = [(line["epoch"], line["train_loss"]) for line in history if "train_loss" in line]
    rate = majority_rate(facts, "test" if "test_accuracy" in result.metrics else "train")
    charts = []
    if any(len(each.points) > 1 for each in scores):
        levels = _near([y for each in scores for _, y in each.points], rate)
        charts.append(line_chart("By epoch", scores, x_title="epoch", y_title="share", levels=levels, at_most=1.0))
    if len(losses) > 1:
        line = Series(name="training loss", points=losses, colour=2, last=f"{losses[-1][1]:.4g}")
        charts.append(
            line_chart(f"Training loss, by {result.plan.release.reading}", [line], x_title="epoch", y_title="loss")
        )
    lines = [(each.name, each.last) for each in scores] + ([] if rate is None else [("majority rate", f"{rate:.4f}")])
    return joined(
        el("p", sentence(f"measured on {facts.measured_on}")),
        el("p", _missing(facts)) if _missing(facts) else None,
        *(el("p", sentence(warning), class_="warn") for warning in result.warnings),
        facts_table(lines) if lines else None,
        el("div", *charts, class_="charts") if charts else None,
        _class_table(facts),
    )


def _near(values: list[float], rate: float | None) -> list[Level]:
    """Return the majority rate as a level, unless it is so low that the other lines would become indistinguishable."""
    low, high = min(values), max(values)
    if rate is None or low - rate > 3 * max(high - low, 0.05):
        return []
    return [Level(name="majority rate", value=rate, shown=f"{rate:.4f}")]


def _class_table(facts: RunFacts) -> Markup | None:
    """Return a table of rows, predictions and recall by class, or None without figures.

    Recall is the share of a class's rows that were predicted as that class.
    """
    lines = [each.to_dict() for each in facts.result.classes[:_MOST_CLASSES]]
    every = (
        ("train", "rows to train"),
        ("test", "rows to test"),
        ("test_predicted", "predicted, test"),
        ("test_recall", "recall, test"),
    )
    columns = [(name, title) for name, title in every if any(name in line for line in lines)]
    if not columns:
        return None
    head = [el("th", "class", scope="col"), *(el("th", title, class_="number", scope="col") for _, title in columns)]
    body = [
        el(
            "tr",
            el("th", line["name"], scope="row"),
            *(el("td", _figure(line.get(name)), class_="number") for name, _ in columns),
        )
        for line in lines
    ]
    return el("div", el("table", el("thead", el("tr", *head)), el("tbody", *body)), class_="scroll")


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else ""


def _missing(facts: RunFacts) -> str:
    """Explain what was not measured and how to measure it."""
    result = facts.result
    in_training = ", or pbmvfl train --prediction-epsilon" if result.plan.algorithm is Algorithm.STAGED else ""
    if result.plan.evaluation is Evaluation.NONE:
        return "Nothing beside training was measured, as the plan has it: `pbmvfl evaluate` does, by a release."
    if not result.metrics:
        return "Nothing was measured: the run ended before its first evaluation."
    if _is_exact(facts):
        return (
            "What the label holder would see of predictions was not measured: that needs a release of test rows, with "
            f"an epsilon of its own (pbmvfl evaluate{in_training})."
        )
    if result.plan.algorithm is Algorithm.STAGED:
        return (
            "Training rows were not measured: local rounds release nothing. Test rows were measured once, at the end."
        )
    return ""


# --- Bytes ---


def _bytes(facts: RunFacts) -> Markup:
    measured, predicted = facts.result.traffic, facts.result.plan.traffic()
    bars = [_bar("measured", measured), _bar("predicted", predicted), _bar("NPQ", facts.npq)]
    if measured == predicted:
        said = f"Measured {human_bytes(measured.total)}, as the plan predicted, to the byte."
    else:
        why = "the run was stopped" if facts.result.stopped else "rounds ran again, or were not all kept in checkpoints"
        said = f"Measured {measured.total:,} bytes where the plan predicted {predicted.total:,}: {why}."
    local = facts.result.plan.algorithm is Algorithm.STAGED
    ratio = facts.npq.total / max(1, measured.total)
    npq = (
        "NPQ is the paper's comparison without privacy and without quantisation: as many epochs, every embedding up "
        "and every gradient down as 32-bit numbers, in messages of the same form. "
        + (f"It would move {_times(ratio)} times as much. " if ratio >= 1 else f"It would move {ratio:.2g} of it. ")
        + ("Here parties train alone, so training sends hardly more than requests." if local else "")
    )
    return joined(
        el("p", said),
        el("p", npq),
        el(
            "div",
            bar_chart("Bytes of all parties", bars, x_title="bytes", label=human_bytes),
            _bytes_table((("measured", measured), ("predicted", predicted), ("NPQ", facts.npq))),
            class_="charts",
        ),
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _bar(name: str, traffic: Traffic) -> Bar:
    pieces = (("set-up", traffic.bytes_setup), ("up", traffic.bytes_up), ("down", traffic.bytes_down))
    return Bar(name=name, pieces=pieces, total=human_bytes(traffic.total))


def _bytes_table(lines: tuple[tuple[str, Traffic], ...]) -> Markup:
    head = [
        el("th", ""),
        *(el("th", name, class_="number", scope="col") for name in ("set-up", "up", "down", "rounds")),
    ]
    body = [
        el(
            "tr",
            el("th", name, scope="row"),
            *(
                el("td", f"{value:,}", class_="number")
                for value in (traffic.bytes_setup, traffic.bytes_up, traffic.bytes_down, traffic.rounds)
            ),
        )
        for name, traffic in lines
    ]
    return el("div", el("table", el("thead", el("tr", *head)), el("tbody", *body)), class_="scroll")


# --- Noise and commands ---


def _noise(facts: RunFacts) -> Markup:
    shares = [(line.what, line.noise / line.signal) for line in facts.noise]
    lines = [(line.what, f"{line.words}: noise {line.noise:.4g}, at most {line.signal:.4g}") for line in facts.noise]
    return joined(
        el(
            "p",
            "The standard deviation of the noise as a share of the largest that the values themselves could be. At 1, "
            "the dotted line, they are alike. Real values are smaller, so noise weighs more than this.",
        ),
        el(
            "div",
            share_chart("Noise as a share of the largest signal", shares, x_title="share"),
            facts_table([(title, words) for title, words in lines]),
            class_="charts",
        ),
    )


def _again(facts: RunFacts) -> Markup:
    parts: list[Child] = []
    for what, command in facts.commands:
        parts += [el("p", f"{what}:", class_="command"), el("pre", command)]
    return joined(
        *parts,
        el(
            "p",
            "From the folder that holds the run's folder. Files of your own are named without their folders, and "
            "LEDGERS is the folder of the parties' ledgers: paths are not part of this page.",
            class_="muted small",
        ),
    )


# --- Predictions since the run ---


def _asked(facts: RunFacts) -> Markup:
    """Return a table of the trained model's predictions, each a separate release."""
    titles = ("rows", "by", "epsilon of a row", "accuracy", "majority rate")
    lines = [
        (
            f"{each.predicted:,}" if each.predicted == each.rows else f"{each.predicted:,} of {each.rows:,}",
            each.law,
            "none" if each.epsilon is None else format_epsilon(each.epsilon),
            _figure(each.accuracy),
            _figure(each.majority_rate),
        )
        for each in facts.asked
    ]
    kinds = (None, None, *["number"] * 3)
    head = el("tr", *(el("th", title, class_=kind) for title, kind in zip(titles, kinds, strict=True)))
    rows = [el("tr", *(el("td", text, class_=kind) for text, kind in zip(line, kinds, strict=True))) for line in lines]
    return joined(
        el(
            "p",
            "What the trained model was asked afterwards, as the run folder notes it. Every row that was predicted is "
            "one release, beside what training cost; a row that is asked about twice pays twice, unless its answer was "
            "kept. The parties' ledgers have the count that holds.",
        ),
        el("div", el("table", el("thead", head), el("tbody", *rows)), class_="scroll"),
    )

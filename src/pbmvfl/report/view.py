"""Contents of a run's page: its verdict, gauges, tables and charts, in the order of the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from pbmvfl._text import counted
from pbmvfl.plan.groups import Algorithm, Evaluation
from pbmvfl.privacy.accounting import NOT_A_PROOF
from pbmvfl.privacy.table import (
    PrivacyTable,
    attack_in_words,
    format_advantage,
    format_epsilon,
    label_in_words,
    privacy_notes,
)
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.report.charts import Level, Plot, Ruler, RulerRow, Series, line_chart, ruler
from pbmvfl.report.epsilon_history import EpsilonPath, LimitPath
from pbmvfl.report.facts import RunFacts
from pbmvfl.report.gauges import Gauge, risk_gauges, verdict
from pbmvfl.wire.traffic import human_bytes

#: Classes shown on the page, and in a matrix that fits a phone; result.json has all of them.
_MOST_CLASSES, _MOST_IN_MATRIX = 30, 12
#: Above this number, parties are counted instead of named.
_MOST_NAMES = 4
_ROWS = {"": "any row", "train": "rows that were trained on", "test": "rows that were predicted"}
_UNITS = {
    Unit.CELL: "one party's values of one row",
    Unit.RECORD: "a whole row, at every party",
    Unit.PARTY: "all values of one party, in every row",
    Unit.LABEL: "the label of one training row",
}
_LINES = (  # name in the history, label, colour, dashed
    ("test_accuracy", "test accuracy", 1, False),
    ("train_accuracy", "train accuracy", 0, False),
    ("test_auprc", "test AUPRC", 1, True),
    ("train_auprc", "train AUPRC", 0, True),
    ("released_train_accuracy", "train accuracy, as the server saw it", 3, False),
    ("released_train_auprc", "train AUPRC, as the server saw it", 3, True),
)


class Cell(NamedTuple):
    """Cell of a table: text, a smaller line below it, and a link within the page."""

    text: str
    small: str = ""
    href: str = ""
    loud: bool = False


class Table(NamedTuple):
    """Table whose columns from number `numbers` on are right-aligned; on a phone each row is a card."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    numbers: int = 1


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


class RunView:
    """One run as the templates show it."""

    def __init__(self, facts: RunFacts, prefix: str = "") -> None:
        self.facts, self.prefix = facts, prefix
        self.result, self.plan = facts.result, facts.result.plan
        self.split = "test" if "test_accuracy" in self.result.metrics else "train"
        self.run = self.result.training_run
        self.is_exact = self.plan.evaluation is Evaluation.SIMULATOR

    # --- Verdict ---

    @cached_property
    def gauges(self) -> list[Gauge]:
        """Training rows, predicted rows (in the run or since) and labels; the worst is marked."""
        asked = self.facts.asked
        found = [(each.advantage, each.epsilon) for each in asked if each.advantage is not None]
        if any(use.kind.split == "test" and use.releases for use in self.result.row_uses):
            bound = self.facts.tables[-1][1].bound(Unit.CELL, Accounting.STRICT)
            found.append((bound.advantage_upper_bound, bound.epsilon))
        detail = "one release; the worst of those since" if asked else "from the server"
        return risk_gauges(self.facts.tables[0][1], found, detail=detail)

    @property
    def worst(self) -> Gauge:
        return next(each for each in self.gauges if each.is_worst)

    @property
    def epsilon(self) -> float:
        """The larger epsilon of a cell, of training and of predicted rows."""
        return max(each.epsilon or 0.0 for each in self.gauges[:2])

    @property
    def verdict(self) -> str:
        """Return the worst of the gauges in a sentence, and the accuracy in another."""
        said = verdict(self.worst)
        if self.result.noise_is_seeded:
            said = "The noise was seeded for a test: it hides nothing, and no epsilon holds."
        if self.facts.accuracy is None:
            return f"{said} Accuracy was not measured."
        rate = "" if self.majority is None else f"; always naming the most frequent class has {self.majority:.3f}"
        return f"{said} {self.split.capitalize()} accuracy is {self.facts.accuracy:.3f}{rate}."

    @property
    def majority(self) -> float | None:
        """Share of the most frequent class, or None if the result lacks it."""
        found = self.result.majority.get(self.split)
        return None if found is None else found.rate

    @property
    def lede(self) -> str:
        plan = self.plan
        test = f"; {counted(plan.num_test_samples, 'row')} to test" if plan.num_test_samples else ""
        return (
            f"{counted(plan.num_parties, 'party', 'parties')} with different columns of the same "
            f"{counted(plan.num_samples, 'row')} of {self.facts.data} trained one model for "
            f"{counted(plan.num_classes, 'class', 'classes')}{test}."
        )

    @property
    def warnings(self) -> Iterator[str]:
        """Yield the conditions that change the meaning of the numbers below."""
        result = self.result
        if result.diverged:
            yield "The loss diverged, which ended the run: the figures are of a model that did not learn."
        elif result.stopped:
            done = counted(sum(each.charged_until - each.first_round for each in result.sessions), "round")
            yield f"A party's ledger ended this run early: {done} of {len(self.plan.schedule):,} were sent."
        if len(result.sessions) > 1:
            yield (
                f"The run was resumed and has {len(result.sessions)} sessions. Rounds that ran again are further "
                "releases, and are counted."
            )

    @property
    def tiles(self) -> Iterator[tuple[str, str, str]]:
        """Yield (value, what, more)."""
        facts, traffic = self.facts, self.result.traffic
        if facts.accuracy is not None:
            yield f"{facts.accuracy:.4f}", f"{self.split} accuracy", self.measured
        if self.majority is not None:
            yield f"{self.majority:.4f}", "majority rate", f"always naming the most frequent class of {self.split} rows"
        rounds = f"{counted(traffic.rounds, 'round')} in {self.result.seconds:.1f} s"
        yield human_bytes(traffic.total), "moved between all parties and the server", rounds

    @property
    def measured(self) -> str:
        found = self.result.measured_on
        return f"{found}, outside the epsilon" if self.is_exact else f"by {found}, released"

    # --- What was trained, and what left ---

    @property
    def trained(self) -> list[tuple[str, str]]:
        plan, facts = self.plan, self.facts
        return [
            ("data", facts.data),
            ("rows", f"{plan.num_samples:,} to train, {plan.num_test_samples:,} to test"),
            ("parties", ", ".join(facts.parties) if facts.parties else f"{plan.num_parties}"),
            ("classes", self._classes()),
            *facts.plan_words,
            *([] if self.result.fusion is None else [("fusion model", self.result.fusion.description)]),
            ("public seed", f"{plan.seed}: order of rows and first weights; never the noise"),
            ("plan", plan.hash.hex()[:16]),
        ]

    def _classes(self) -> str:
        classes, positive = self.result.classes, self.result.positive_class
        if not classes:
            return f"{self.plan.num_classes}"
        names = ", ".join(each.name for each in classes[:_MOST_CLASSES])
        more = ", ..." if len(classes) > _MOST_CLASSES else ""
        said = "" if positive is None else f"; AUPRC is of {positive}"
        return f"{len(classes)}: {names}{more}{said}"

    @property
    def released(self) -> Table:
        """Rounds of the run by kind: how often each row was in one, and what of it left its party."""
        rows = []
        for use in self.result.row_uses:
            if use.releases or use.updates:
                kind = use.kind
                left = self.plan.mechanism_for(kind).describe() if kind.releases else "nothing"
                rows.append((kind.name, str(kind.split), f"{use.releases or use.updates:,}", left))
        return Table(("rounds", "rows", "uses of a row", "what left a party"), rows, 9)

    # --- Privacy ---

    @property
    def privacy(self) -> Iterator[tuple[str, Table, list[str]]]:
        """Yield (heading, epsilon table, sentences) for each split that is charged separately."""
        for rows, table in self.facts.tables:
            said = [sentence(attack_in_words(table.bound(Unit.CELL, Accounting.STRICT)))]
            if table.label is not None:
                said.append(sentence(label_in_words(table.label)))
            yield (_ROWS[rows].capitalize() if len(self.facts.tables) > 1 else "", self._epsilons(table), said)

    def _epsilons(self, table: PrivacyTable) -> Table:
        counts = [each for each in Accounting if self.run.has_joint_rounds or each is Accounting.STRICT]
        bounds = [bound for bound in table.of_columns if bound.accounting in counts]
        adversaries = list(dict.fromkeys(bound.adversary for bound in bounds))
        body = []
        for unit, accounting in dict.fromkeys((bound.unit, bound.accounting) for bound in bounds):
            unproved = ", not a proof" if accounting is Accounting.PAPER and unit is not Unit.PARTY else ""
            line: list[Cell | str] = [f"{unit}", f"{accounting}{unproved}"]
            for adversary in adversaries:
                bound = table.bound(unit, accounting, adversary)
                loud = (unit, accounting, adversary) == (Unit.CELL, Accounting.STRICT, Adversary())
                small = f"adv. {format_advantage(bound.advantage_upper_bound)}"
                line.append(Cell(format_epsilon(bound.epsilon), small, loud=loud))
            body.append(line)
        return Table(("protects", "counting", *(f"from {adversary}" for adversary in adversaries)), body, 2)

    @property
    def both(self) -> str:
        return "" if self.facts.both is None else format_epsilon(self.facts.both)

    @property
    def reading(self) -> Iterator[str]:
        yield (
            "Epsilon bounds how much more likely any output becomes if values are others: at most exp(epsilon) times, "
            f"but for a probability of delta = {self.facts.delta:g}. The advantage (adv.) is that of the best attack: "
            "0 is blind guessing, 1 is certainty."
        )
        yield "; ".join(f"{unit}: {words}" for unit, words in _UNITS.items()) + "."
        others = counted(self.plan.num_parties - 1, "party", "parties")
        yield (
            f"From whom: the server, which sees every message; one curious party; the server with {others}, which is "
            "everybody but the one whose values are protected."
        )
        paper = f" As the paper counts: {NOT_A_PROOF}." if self.run.has_joint_rounds else ""
        yield f"Strict counting covers all that can depend on the values: a theorem under its assumptions.{paper}"

    @property
    def assumptions(self) -> list[str]:
        strict = self.facts.tables[0][1].bound(Unit.CELL, Accounting.STRICT)
        return [sentence(condition) for condition in strict.conditions]

    @property
    def notes(self) -> list[str]:
        found = privacy_notes(self.run, num_samples=self.plan.num_samples, delta=self.facts.delta)
        return [sentence(note) for note in found]

    # --- Epsilon over rounds ---

    @property
    def about_ledgers(self) -> str:
        facts = self.facts
        account = "By the account: what the table above says, as it grew. It is about this run alone."
        if not facts.has_ledgers:
            return f"This run has no ledgers: it was not added to other runs of the same rows. {account}"
        if not facts.reads_ledgers:
            return f"This run has ledgers, and none of them can be read from here. {account}"
        if not facts.limits:
            return f"This run has ledgers, and their owners set no limit for {facts.data}. {account}"
        later = " Some rows were used again since." if any(_grew(path) for path in facts.limits) else ""
        return (
            "By the ledgers: what their owners count against their limits, over all runs of the same rows before this "
            f"one. That number may be larger, because it holds whatever is run next.{later} {account}"
        )

    @property
    def over_rounds(self) -> list[Plot]:
        return [*map(self._limit_chart, self.facts.limits), *self._account_charts()]

    def _limit_chart(self, path: LimitPath) -> Plot:
        limit = path.limit
        name = f"{limit.unit}, {limit.accounting}, {Adversary(colluding_parties=limit.colluding_parties)}"
        last = format_epsilon(path.points[-1][1])
        last += f", by now {format_epsilon(path.spent_now)}" if _grew(path) else ""
        whose = f"ledger{'' if len(path.ledgers) == 1 else 's'} of {', '.join(path.ledgers)}"
        if len(path.ledgers) > _MOST_NAMES:
            whose = f"ledgers of {len(path.ledgers)} parties, which are alike"
        return line_chart(
            f"By the {whose}",
            [Series(name=name, points=path.points, colour=0, steps=True, last=last)],
            x_title="rounds sent",
            y_title=f"epsilon, delta {limit.delta:g}",
            levels=[Level(name="limit", value=limit.epsilon, shown=f"{limit.epsilon:g}")],
            from_zero=True,
        )

    def _account_charts(self) -> Iterator[Plot]:
        drawn = [path for path in self.facts.paths if _finite(path)]
        for accounting, rows in dict.fromkeys((path.accounting, path.rows) for path in drawn):
            unproved = ", not a proof" if accounting is Accounting.PAPER else ""
            whose = f", {_ROWS[rows]}" if rows else ""
            series = [
                Series(
                    name=str(path.unit),
                    points=path.points,
                    colour=i,
                    steps=True,
                    dashed=path.unit is Unit.RECORD,
                    last=format_epsilon(path.points[-1][1]),
                )
                for i, path in enumerate(p for p in drawn if (p.accounting, p.rows) == (accounting, rows))
            ]
            title = f"By the account, {accounting}{unproved}{whose}"
            y_title = f"epsilon, delta {self.facts.delta:g}"
            yield line_chart(title, series, x_title="rounds sent", y_title=y_title, from_zero=True)

    # --- Accuracy ---

    @cached_property
    def _scores(self) -> list[Series]:
        history = self.facts.written.get("history", [])
        return [
            Series(name=title, points=points, colour=colour, dashed=dashed, last=f"{points[-1][1]:.4f}")
            for name, title, colour, dashed in _LINES
            if (points := [(line["epoch"], line[name]) for line in history if name in line])
        ]

    @property
    def figures(self) -> list[tuple[str, str]]:
        rate = [] if self.majority is None else [("majority rate", f"{self.majority:.4f}")]
        return [(each.name, each.last) for each in self._scores] + rate

    @property
    def accuracy_charts(self) -> Iterator[Plot]:
        scores, history = self._scores, self.facts.written.get("history", [])
        if any(len(each.points) > 1 for each in scores):
            values = [y for each in scores for _, y in each.points]
            levels = []
            # A rate so low that the lines would become indistinguishable is left out.
            near = self.majority is not None and min(values) - self.majority <= 3 * max(max(values) - min(values), 0.05)
            if self.majority is not None and near:
                levels = [Level(name="majority rate", value=self.majority, shown=f"{self.majority:.4f}")]
            yield line_chart("By epoch", scores, x_title="epoch", y_title="share", levels=levels, at_most=1.0)
        losses = [(line["epoch"], line["train_loss"]) for line in history if "train_loss" in line]
        if len(losses) > 1:
            line = Series(name="training loss", points=losses, colour=2, last=f"{losses[-1][1]:.4g}")
            title = f"Training loss, by {self.plan.release.reading}"
            yield line_chart(title, [line], x_title="epoch", y_title="loss")
        yield from self._score_charts()

    def _score_charts(self) -> Iterator[Plot]:
        found = self._figures_of_scores
        if points := found.get("precision_recall"):
            positive = self.result.positive_class
            line = Series(name=f"{self.split} rows of {positive}", points=points, colour=1)
            counts = [sum(line) for line in found["confusion"]]
            rate = counts[1] / sum(counts)
            levels = [Level(name="constant scores", value=rate, shown=f"{rate:.3f}")]
            title = "Precision and recall"
            yield line_chart(title, [line], x_title="recall", y_title="precision", levels=levels, shares=True)
        if points := found.get("calibration"):
            lines = [
                Series(name="calibrated", points=[(0, 0), (1, 1)], colour=5, dashed=True),
                Series(name=f"{self.split} rows", points=[(x, y) for x, y, _ in points], colour=1),
            ]
            x_title = "probability that the model names"
            yield line_chart("Calibration", lines, x_title=x_title, y_title="share right", shares=True)

    @property
    def _figures_of_scores(self) -> dict[str, Any]:
        found: dict[str, Any] = self.result.scores.get(self.split, {})
        return found

    @property
    def confusion(self) -> tuple[list[str], list[tuple[str, list[tuple[int, int]]]]] | None:
        """Short names of the classes, and for each its name and (rows, tenths of its rows) by predicted class."""
        counts = self._figures_of_scores.get("confusion")
        names = [each.name for each in self.result.classes]
        if not counts or len(counts) > _MOST_IN_MATRIX or len(counts) != len(names):
            return None
        short = names if all(len(name) <= 3 for name in names) else [str(i) for i, _ in enumerate(names, 1)]
        whole = names if short == names else [f"{i} {name}" for i, name in enumerate(names, 1)]
        shares = [[(rows, round(9 * rows / max(1, sum(line)))) for rows in line] for line in counts]
        return short, list(zip(whole, shares, strict=True))

    @property
    def classes(self) -> Table | None:
        """Rows, predictions and recall by class, or None without figures."""
        lines = [each.to_dict() for each in self.result.classes[:_MOST_CLASSES]]
        every = {
            "train": "rows to train",
            "test": "rows to test",
            "test_predicted": "predicted, test",
            "test_recall": "recall, test",
        }
        columns = [name for name in every if any(name in line for line in lines)]
        rows = [[line["name"], *(_figure(line.get(name)) for name in columns)] for line in lines]
        return Table(("class", *(every[name] for name in columns)), rows) if columns else None

    @property
    def missing(self) -> str:
        """Explain what was not measured and how to measure it."""
        if self.plan.evaluation is Evaluation.NONE:
            return "The plan measures nothing after training; `pbmvfl evaluate` does, by a charged release."
        if not self.result.metrics:
            return "Nothing was measured: the run ended before its first evaluation."
        staged = self.plan.algorithm is Algorithm.STAGED
        if self.is_exact:
            return (
                "What the label holder would see of predictions was not measured: that needs a release of test rows, "
                f"with an epsilon of its own (pbmvfl evaluate{', or pbmvfl train --prediction-epsilon' * staged})."
            )
        return "Test rows were measured once, at the end." if staged else ""

    # --- Predictions since the run, attacks ---

    @property
    def asked(self) -> Table:
        rows = [
            (
                f"{each.predicted:,}" if each.predicted == each.rows else f"{each.predicted:,} of {each.rows:,}",
                each.law,
                "none" if each.epsilon is None else format_epsilon(each.epsilon),
                _figure(each.accuracy),
                _figure(each.majority_rate),
            )
            for each in self.facts.asked
        ]
        return Table(("rows", "by", "epsilon of a row", "accuracy", "majority rate"), rows, 2)

    @property
    def attack_charts(self) -> Iterator[Plot | Ruler]:
        attack = self.facts.attack
        rows = [
            RulerRow(
                name=f"{score.attack} ({score.attacker})",
                more=score.setting,
                shown=f"{100 * score.value:.0f}",
                marks=(("sees nothing", 100 * score.baseline, 5), ("attack", 100 * score.value, 1)),
                bound=None if score.bound is None else 100 * score.bound,
            )
            for score in attack.scores
            if score.measure == "share right"
        ]
        if rows:
            legend = (("mark c5", "sees nothing"), ("mark c1", "attack"), ("bound", "the account permits"))
            yield ruler("Right guesses of 100", rows, x_title="right guesses of 100", legend=legend, ends=(0, 100))
        if attack.found:
            lines = [
                Series(name=name, points=points, colour=i, last=f"{points[-1][1]:.0%}")
                for i, (name, points) in enumerate(attack.found.items())
            ]
            blind = Level(name="blind guess", value=1 / attack.candidates, shown=f"{1 / attack.candidates:.2%}")
            title = f"True row found among {attack.candidates:,}"
            chart: dict[str, Any] = {"x_title": "releases of the row", "y_title": "share found", "levels": [blind]}
            yield line_chart(title, lines, **chart, from_zero=True, at_most=1.0, log=True)

    @property
    def attacks(self) -> Table:
        rows = []
        for score in self.facts.attack.scores:
            permits = score.bound_words if score.bound is None else f"{score.bound:.3f} ({score.bound_words})"
            texts = (score.setting, score.attack, score.attacker, score.measure)
            rows.append((*texts, f"{score.baseline:.3f}", f"{score.value:.3f}", permits))
        titles = ("setting", "attack", "attacker", "measure", "sees nothing", "attack gets", "account permits")
        return Table(titles, rows, 9)

    # --- Bytes ---

    @property
    def traffic(self) -> tuple[str, Ruler, Table]:
        """Describe the traffic beside the plan's prediction and the paper's NPQ: in words, as marks and as numbers."""
        measured, predicted, npq = self.result.traffic, self.plan.traffic(), self.facts.npq
        said = f"Measured {human_bytes(measured.total)}, as the plan predicted, to the byte."
        if measured != predicted:
            why = "the run was stopped" if self.result.stopped else "rounds ran again, or not all were kept"
            said = f"Measured {measured.total:,} bytes where the plan predicted {predicted.total:,}: {why}."
        ratio = npq.total / max(1, measured.total)
        said += f" NPQ would move {f'{ratio:,.0f}' if ratio >= 100 else f'{ratio:.3g}'} times as much."
        lines = (("measured", measured), ("predicted", predicted), ("NPQ", npq))
        rows = [
            RulerRow(name=name, shown=human_bytes(each.total), marks=((name, each.total, i),))
            for i, (name, each) in enumerate(lines)
        ]
        numbers = [
            (name, *(f"{n:,}" for n in (each.bytes_setup, each.bytes_up, each.bytes_down, each.rounds)))
            for name, each in lines
        ]
        chart = ruler("Bytes of all parties", rows, x_title="bytes", label=human_bytes)
        return said, chart, Table(("bytes", "set-up", "up", "down", "rounds"), numbers)

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Return (name, title) of the sections that the run has."""
        facts = self.facts
        every = (
            ("privacy", "What the run reveals", True),
            ("accuracy", "Accuracy", True),
            ("rounds", "Epsilon over the rounds", True),
            ("asked", "Predictions since", bool(facts.asked)),
            ("attacks", "Attacks and audit", bool(facts.attack.scores or facts.audit)),
            ("trained", "What was trained", True),
            ("bytes", "Bytes", True),
            ("again", "Do it again", True),
        )
        return [(name, title) for name, title, is_there in every if is_there]


def _grew(path: LimitPath) -> bool:
    return bool(path.spent_now > path.points[-1][1] * (1 + 1e-9))


def _finite(path: EpsilonPath) -> bool:
    """Return whether a path can be drawn: it has rounds, and every epsilon is finite."""
    return len(path.points) > 1 and all(math.isfinite(epsilon) for _, epsilon in path.points)


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else ""

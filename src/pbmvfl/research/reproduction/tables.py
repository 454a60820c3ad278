"""Tables of a study, and the exact epsilon of a simulated plan."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pbmvfl._text import counted
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import SERVER, Accounting, Unit
from pbmvfl.research.reproduction.records import Record, epochs_to, mean_epochs_to
from pbmvfl.research.reproduction.studies import Cell, Study
from pbmvfl.wire.gradient_codecs import GradientCodecName

# --- Exact epsilon of a simulated plan if it were deployed: cell, the paper's count, the server, delta 1e-5 ---


DELTA = 1e-5


def short_epsilon(epsilon: float) -> str:
    """Format three significant digits, rounded up, and large values in full: 1,980 and not 1.98e+03."""
    if not math.isfinite(epsilon) or epsilon < 100:
        return format_epsilon(epsilon)
    unit = 10 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:,.0f}"


@lru_cache(maxsize=1024)
def paper_epsilon(plan: Plan, num_epochs: int) -> float:
    """Return the epsilon by the paper's count: a cell's own releases only.

    Batch normalisation couples the rows of a batch, which the paper does not count either; `coupled_epsilon` does.
    """
    run = replace(plan.replace(num_epochs=num_epochs).training_run(), rows_together=1)
    return epsilon_bound(run, Unit.CELL, Accounting.PAPER, SERVER, delta=DELTA).epsilon


def coupled_epsilon(plan: Plan, num_epochs: int) -> float:
    """Return the epsilon by the paper's count, with every row of a coupled batch counted."""
    run = plan.replace(num_epochs=num_epochs).training_run()
    return epsilon_bound(run, Unit.CELL, Accounting.PAPER, SERVER, delta=DELTA).epsilon


# --- A table of the paper beside ours: epochs to the target, and the true size of the messages ---


#: A printed value agrees if it lies within 30% or 5 epochs of the range of our seeds.
SLACK_SHARE = 0.3
SLACK_EPOCHS = 5
#: The unit of the printed cost columns, in bits: that is what they contain, whatever they are called (docs).
_PRINTED_BITS = {"GB": 1e9, "MB": 1e6}


def agrees(printed: int, low: int, high: int) -> bool:
    below = min(low * (1 - SLACK_SHARE), low - SLACK_EPOCHS)
    above = max(high * (1 + SLACK_SHARE), high + SLACK_EPOCHS)
    return below <= printed <= above


#: Bits of a floating-point number in the paper's cost columns (F).
_FLOAT_BITS = 32


def communication_bits(
    *,
    num_epochs: int,
    num_samples: int,
    batch_size: int,
    num_parties: int,
    embedding_dim: int,
    num_trials: int | None,
) -> float:
    """Return the cost T * B * M * P * (ln(b*M) + F) of Section 5, with F = 32, and 2F for NPQ (num_trials=None).

    T * B is epochs * ceil(N/B) * B, the logarithm is natural and the unit is the bit: that is what the cost columns of
    Tables 1, 4 and 6 contain, whatever they are called there. Real messages are counted elsewhere, in bytes.
    """
    up = _FLOAT_BITS if num_trials is None else math.log(num_trials * num_parties)
    rows = num_epochs * math.ceil(num_samples / batch_size) * batch_size
    return rows * num_parties * embedding_dim * (up + _FLOAT_BITS)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One configuration: the printed values, ours, and their comparison."""

    cell: Cell
    plan: Plan
    #: Epochs that were run where the target was not reached.
    limit_epochs: int
    #: First epoch at the target, one a seed; None where it was not reached.
    epochs: tuple[int | None, ...]
    #: The epoch at which the mean of the seeds' curves reaches the target.
    mean_curve: int | None
    #: Run for fewer epochs than the study needs, without reaching the target.
    is_cut_short: bool = False

    @property
    def reached(self) -> list[int]:
        return [epoch for epoch in self.epochs if epoch is not None]

    @property
    def all_reached(self) -> bool:
        return len(self.reached) == len(self.epochs)

    @property
    def mean(self) -> float | None:
        return sum(self.reached) / len(self.reached) if self.reached and self.all_reached else None

    @property
    def is_beyond(self) -> bool:
        """Return True if the printed epoch is beyond the limit and the target was not reached: nothing to compare."""
        printed = self.cell.printed_epochs
        return printed is not None and printed > self.limit_epochs and not self.reached

    @property
    def verdict(self) -> str:
        """Compare by the rule of the study; without a seed that reached the target there is no range to compare."""
        printed = self.cell.printed_epochs
        if printed is None:
            if not self.reached:
                return f"not in {self.limit_epochs}" if self.is_cut_short else "agrees"
            return "reached" if self.all_reached else "reached by some"
        if self.is_beyond:
            return f"both > {self.limit_epochs}"
        if not self.reached:
            return "ours later"
        # A seed that did not reach the target lies above the limit by an unknown amount.
        ends = [self.limit_epochs + 1 if epoch is None else epoch for epoch in self.epochs]
        if agrees(printed, min(ends), max(ends)):
            return "agrees"
        return "ours later" if min(ends) > printed else "ours earlier"

    @property
    def compared_epochs(self) -> int | None:
        """Return the mean curve's epoch, for the columns of bytes and epsilon."""
        return self.mean_curve

    def to_dict(self) -> dict[str, Any]:
        cell, plan = self.cell, self.plan
        none = cell.mechanism == "none"
        ours = self.mean
        printed = cell.printed_epochs
        values: dict[str, Any] = {
            "b": "NPQ" if none else cell.num_trials,
            "beta": "" if none else cell.beta,
            "printed_epochs": "never" if printed is None else printed,
            "ours_mean": self._text(ours),
            "ours_min": self._text(min(self.reached) if self.reached else None),
            "ours_max": self._text(max(self.reached) if self.all_reached and self.reached else None),
            "seeds_reached": f"{len(self.reached)}/{len(self.epochs)}",
            "ours_mean_curve": self._text(self.mean_curve),
            "difference": "" if ours is None or printed is None else f"{ours - printed:+.1f}",
            "verdict": self.verdict,
            "epsilon": "" if self.compared_epochs is None else short_epsilon(paper_epsilon(plan, self.compared_epochs)),
        }
        return values

    def _text(self, value: float | None) -> str:
        return f"> {self.limit_epochs}" if value is None else f"{value:.1f}".removesuffix(".0")

    def cost(self, unit: str) -> dict[str, Any]:
        """Return megabytes (10^6 bytes): as printed, by the printed formula at the printed epochs, and on our wire."""
        cell, printed = self.cell, self.cell.printed_epochs
        none = cell.mechanism == "none"
        values: dict[str, Any] = {
            "b": "NPQ" if none else cell.num_trials,
            "beta": "" if none else cell.beta,
            f"printed_{unit}": "never" if cell.printed_cost is None else cell.printed_cost,
            "formula_Gbit": "",
            "wire_float32_MB": "",
            "wire_int8_MB": "",
            "ours_epochs": self._text(self.compared_epochs),
            "ours_float32_MB": "",
            "ours_int8_MB": "",
        }
        if printed is not None:
            bits = communication_bits(
                num_epochs=printed,
                num_samples=self.plan.num_samples,
                batch_size=self.plan.batch_size,
                num_parties=self.plan.num_parties,
                embedding_dim=self.plan.embedding_dim,
                num_trials=None if none else cell.num_trials,
            )
            values["formula_Gbit"] = f"{bits / 1e9:.3f}"
            values["wire_float32_MB"], values["wire_int8_MB"] = (_wire(self.plan, printed, c) for c in _CODECS)
        if self.compared_epochs is not None:
            both = (_wire(self.plan, self.compared_epochs, codec) for codec in _CODECS)
            values["ours_float32_MB"], values["ours_int8_MB"] = both
        return values


_CODECS = (GradientCodecName.FLOAT32, GradientCodecName.INT8)


def _wire(plan: Plan, num_epochs: int, codec: GradientCodecName) -> str:
    return f"{plan.replace(num_epochs=num_epochs, gradient_codec=codec).traffic().total / 1e6:.1f}"


def table_rows(study: Study, results: Sequence[tuple[Cell, Sequence[Record]]], *, limit_epochs: int) -> list[TableRow]:
    assert study.target is not None
    rows = []
    for cell, records in results:
        histories = [record.history[:limit_epochs] for record in records]
        epochs = tuple(epochs_to(history, *study.target) for history in histories)
        mean_curve = mean_epochs_to(histories, *study.target)
        short = [len(history) for history, epoch in zip(histories, epochs, strict=True) if epoch is None]
        if mean_curve is None:
            short.append(min(len(history) for history in histories))
        run_epochs = min(short, default=limit_epochs)
        rows.append(
            TableRow(
                cell=cell,
                plan=records[0].plan,
                limit_epochs=run_epochs,
                epochs=epochs,
                mean_curve=mean_curve,
                is_cut_short=run_epochs < limit_epochs,
            )
        )
    return rows


def as_csv(lines: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_markdown(lines: Sequence[dict[str, Any]], headings: dict[str, str] | None = None) -> str:
    names = list(lines[0])
    titles = [(headings or {}).get(name, name.replace("_", " ")) for name in names]
    out = ["| " + " | ".join(titles) + " |", "|" + "|".join(" ---: " for _ in names) + "|"]
    out += ["| " + " | ".join(str(line[name]) for name in names) + " |" for line in lines]
    return "\n".join(out) + "\n"


_HEADINGS = {
    "printed_epochs": "printed",
    "ours_mean": "ours, mean",
    "ours_min": "min",
    "ours_max": "max",
    "seeds_reached": "seeds that reached it",
    "ours_mean_curve": "mean curve",
    "epsilon": "epsilon",
}


def _lost_factor(rows: Sequence[TableRow], bits: float) -> str:
    """Return the sentence about printed PBM rows that are a tenth of the formula (Table 1), or an empty string."""
    ratios = [
        float(row.cost("")["formula_Gbit"]) * 1e9 / bits / row.cell.printed_cost
        for row in rows
        if row.cell.mechanism == "pbm" and row.cell.printed_epochs and row.cell.printed_cost
    ]
    if not ratios or not all(9.5 < ratio < 10.5 for ratio in ratios):
        return ""
    return "; the PBM rows are printed ten times too small, the NPQ row is not"


def _seeds(rows: Sequence[TableRow]) -> str:
    """Count the seeds of the cells; where they differ, the cells of each count."""
    counts = Counter(len(row.epochs) for row in rows)
    if len(counts) == 1:
        return counted(next(iter(counts)), "seed")
    parts = (f"{counted(seeds, 'seed')} in {counted(cells, 'cell')}" for seeds, cells in sorted(counts.items()))
    return " and ".join(parts)


def table_markdown(study: Study, rows: Sequence[TableRow], *, notes: Sequence[str]) -> str:
    lines = [row.to_dict() for row in rows]
    beyond = Counter(row.limit_epochs for row in rows if row.is_beyond)
    finite = [row for row in rows if row.cell.printed_epochs is not None and not row.is_beyond]
    cut_short = sum(row.is_cut_short for row in rows)
    good = sum(row.verdict == "agrees" for row in finite)
    bits = _PRINTED_BITS[study.printed_unit]
    assert study.target is not None
    text = [
        f"# {study.title}",
        "",
        f"Epochs until the metric of the whole train set, without noise, first reaches {study.target[1]:g}; "
        "one epoch there is enough, and the next may be below it again. "
        f"{_seeds(rows).capitalize()}, at most {max(row.limit_epochs for row in rows)} epochs"
        + (f" (fewer in {counted(cut_short, 'cell')}, as shown)" if cut_short else "")
        + ". *Mean curve*: the first epoch at "
        "which the mean of the seeds' curves reaches it. *Difference*: our mean less the printed value. A printed "
        f"value *agrees* within {SLACK_SHARE:.0%} or {SLACK_EPOCHS} epochs of the range of our seeds. *Epsilon*: of "
        "the same plan in a deployment, for as many epochs as the mean curve; one party's values of one row, against "
        "the server, as the paper counts, delta 1e-5. Noise: simulation.",
        "",
        as_markdown(lines, _HEADINGS),
        f"{good} of {len(finite)} finite printed cells agree."
        + "".join(
            f" {count} printed beyond {limit} epochs: not reached in {limit}."
            for limit, count in sorted(beyond.items())
        ),
        "",
        "## Communication",
        "",
        f"The printed column is called {study.printed_unit} and contains units of 10^{math.log10(bits):.0f} bits by "
        f"the printed formula, with a natural logarithm{_lost_factor(rows, bits)}. Beside it: the formula in Gbit, "
        "and the bytes of our messages in MB (10^6 bytes; all parties, both directions, headers and set-up included) "
        "with float32 and with int8 gradients, at the printed number of epochs and at that of our mean curve.",
        "",
        as_markdown([row.cost(study.printed_unit) for row in rows]),
        *([*(f"- {note}" for note in notes), ""] if notes else []),
        "",
    ]
    return "\n".join(text)

"""Publication of finished runs: a CSV and a Markdown page per table, a picture and a page per figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbmvfl._files import write_atomically
from pbmvfl.report.plots import COLOURS, save_figure
from pbmvfl.research.reproduction.claims import FALSE_ALARM, Claim, Find, score, study_claims
from pbmvfl.research.reproduction.records import EPSILON_NOTE, Record
from pbmvfl.research.reproduction.studies import Cell, Panel, Study
from pbmvfl.research.reproduction.study_runner import StudyRunner
from pbmvfl.research.reproduction.tables import (
    DELTA,
    as_csv,
    as_markdown,
    coupled_epsilon,
    paper_epsilon,
    short_epsilon,
    table_markdown,
    table_rows,
)
from pbmvfl.research.simulation.engine import SIMULATED

# --- Figures of the paper in its arrangement: one panel each, LDP as printed above and LDP at equal epsilon below ---
#
# Colour tells b (or beta) apart, line style the mechanism; a band is the range of the seeds. The exact epsilon stands
# at the end of each curve.

_LABELS = {"test_accuracy": "test accuracy", "test_auprc": "test AUPRC", "train_accuracy": "train accuracy"}
_STYLES: dict[str, Any] = {"pbm": "-", "none": "-", "ldp": ":", "ldp-calibrated": "--"}
_ROWS = (("ldp", "LDP with the printed noise"), ("ldp-calibrated", "LDP at the epsilon of PBM"))
_BLACK = COLOURS[-1]
#: Room for the labels at the right, as a share of the epochs, by the number of panels in a row.
_ROOM = {1: 0.15, 2: 0.24, 3: 0.42}


def draw_study(study: Study, find: Find, folder: Path, *, limit_epochs: int, note: str = "") -> list[Path]:
    """Draw every figure of the study that has runs."""
    paths = []
    for name, panels in study.figures.items():
        if all(find(cell) is None for panel in panels for cell in panel.cells):
            continue
        path = folder / f"{name}.png"
        _draw(study, panels, find, path, limit_epochs=limit_epochs, note=note)
        paths.append(path)
    return paths


def _draw(study: Study, panels: Sequence[Panel], find: Find, path: Path, *, limit_epochs: int, note: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in _ROWS if any(cell.mechanism == row[0] for panel in panels for cell in panel.cells)]
    rows = rows or [("none", "")]
    found = [find(cell) or () for panel in panels for cell in panel.cells]
    lengths = [min(limit_epochs, len(record.history)) for records in found for record in records]
    style: Any = {"axes.spines.right": False, "axes.spines.top": False, "font.size": 9, "figure.dpi": 150}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            len(rows),
            len(panels),
            figsize=(10.0, 3.0 * len(rows) + 0.9),
            squeeze=False,
            sharex=True,
            sharey=True,
            layout="constrained",
        )
        for row, (baseline, name) in enumerate(rows):
            for column, panel in enumerate(panels):
                axis = axes[row, column]
                _draw_panel(
                    axis, study, panel, find, baseline, limit_epochs, longest=max(lengths), room=_ROOM[len(panels)]
                )
                if row == 0:
                    axis.set_title(panel.title.replace("beta", "β"), fontsize=10)
                if row == len(rows) - 1:
                    axis.set_xlabel("epoch")
                if column == 0:
                    axis.set_ylabel(f"{_LABELS[study.metric]}" + (f"\n{name}" if name else ""))
        _legend(figure, panels, rows)
        heading = f"{study.title.partition(':')[0]}. At each curve's end: ε of the same plan in a deployment"
        figure.suptitle(
            f"{heading}\n(one party's values of one row, against the server, the paper's count, δ = 1e-5)" + note,
            fontsize=9,
        )
        save_figure(figure, path)


def _draw_panel(
    axis: Any, study: Study, panel: Panel, find: Find, baseline: str, limit_epochs: int, *, longest: int, room: float
) -> None:
    ends: list[tuple[float, str, str]] = []
    for cell in panel.cells:
        records = find(cell)
        if cell.mechanism not in ("pbm", "none", baseline) or not records:
            continue
        curves = [[line[study.metric] for line in record.history[:limit_epochs]] for record in records]
        length = min(len(curve) for curve in curves)
        values = np.array([curve[:length] for curve in curves])
        epochs = np.arange(1, length + 1)
        colour, width = _colour(cell, panel), 1.2 if cell.mechanism == baseline else 1.7
        mean = values.mean(0)
        axis.plot(
            epochs, mean, _STYLES[cell.mechanism], color=colour, linewidth=width, marker="." if length < 3 else ""
        )
        if len(values) > 1:
            axis.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.13, linewidth=0)
        epsilon = "∞" if cell.mechanism == "none" else short_epsilon(paper_epsilon(records[0].plan, length))
        name = "NPQ " if cell.mechanism == "none" else "LDP " if cell.mechanism == baseline else ""
        ends.append((float(mean[-1]), f"{name}ε {epsilon}", colour))
    axis.set_xlim(0, longest * (1 + room))
    axis.set_xticks([tick for tick in axis.get_xticks() if 0 <= tick <= longest])
    axis.grid(alpha=0.25)
    axis.margins(y=0.06)
    _write_ends(axis, ends, longest)


def _write_ends(axis: Any, ends: list[tuple[float, str, str]], longest: int) -> None:
    """Write labels beside the last points, inside the panel, moved apart without overlap, each tied to its curve."""
    low, high = axis.get_ylim()
    gap = (high - low) * 0.07
    ends = sorted(ends, key=lambda end: end[0])
    places = spread([end[0] for end in ends], gap=gap, low=low + gap / 2, high=high - gap / 2)
    for place, (value, text, colour) in zip(places, ends, strict=True):
        axis.annotate(
            text,
            xy=(longest, value),
            xytext=(longest * 1.06, place),
            color=colour,
            fontsize=7.5,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Return the places nearest to the wanted ones (in order) that are a gap apart and within the limits, if they fit.

    With u_i = place_i - i*gap this is isotonic regression: pool neighbours that are out of order, then clip.
    """
    pools: list[list[float]] = []
    for index, value in enumerate(wanted):
        pools.append([value - index * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [float(np.mean(pool)) for pool in pools for _ in pool]
    top = max(low, high - (len(wanted) - 1) * gap)
    return [min(max(value, low), top) + index * gap for index, value in enumerate(flat)]


def _values(panel: Panel) -> list[float]:
    return sorted({_value(cell, panel) for cell in panel.cells if cell.mechanism == "pbm"})


def _value(cell: Cell, panel: Panel) -> float:
    num_trials, beta = cell.equal_to or (cell.num_trials, cell.beta)
    return float(num_trials if panel.told_apart_by == "num_trials" else beta)


def _colour(cell: Cell, panel: Panel) -> str:
    if cell.mechanism == "none":
        return _BLACK
    return COLOURS[_values(panel).index(_value(cell, panel)) % (len(COLOURS) - 1)]


def _legend(figure: Any, panels: Sequence[Panel], rows: Sequence[tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    panel = panels[0]
    sign = "b" if panel.told_apart_by == "num_trials" else "β"
    handles = [Line2D([], [], color=_BLACK, label="NPQ: no privacy, no quantisation")]
    handles += [
        Line2D([], [], color=COLOURS[i % (len(COLOURS) - 1)], label=f"PBM, {sign} = {value:g}")
        for i, value in enumerate(_values(panel))
    ]
    names = {"ldp": "LDP, printed noise", "ldp-calibrated": "LDP, equal ε"}
    handles += [
        Line2D([], [], color="0.45", linestyle=_STYLES[name], label=names[name]) for name, _ in rows if name in names
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


# --- Files and pages ---

STAND_IN = "Made-up rows stood in for the data: these numbers say nothing about it."
QUICK = "A smoke run on few rows and epochs: these numbers say nothing about the paper."


class Publisher:
    """Writer of the tables, figures and pages of a study, from the runs that exist."""

    def __init__(self, runner: StudyRunner, out: Path) -> None:
        self._runner, self._out = runner, out
        self._found: dict[Cell, list[Record] | None] = {}

    def _find(self, cell: Cell) -> list[Record] | None:
        if cell not in self._found:
            self._found[cell] = self._runner.shown_records(cell)
        return self._found[cell]

    def notes(self) -> list[str]:
        notes = [*self._runner.study.notes]
        if self._runner.uses_stand_in:
            notes.append(STAND_IN)
        if self._runner.study.quick:
            notes.append(QUICK)
        notes.append(EPSILON_NOTE[0].upper() + EPSILON_NOTE[1:] + ".")
        return notes

    def publish(self) -> list[Path]:
        """Write all files and return their paths; cells without runs are left out and counted in the notes."""
        study = self._runner.study
        cells = study.all_cells()
        self._out.mkdir(parents=True, exist_ok=True)
        missing = [cell for cell in cells if self._find(cell) is None]
        notes = self.notes()
        if missing:
            notes.append(f"{len(missing)} of {len(cells)} configurations have no finished runs yet.")
        if len(missing) == len(cells):
            return []
        claims = study_claims(study, self._find, limit_epochs=self._runner.limit_epochs)
        return self._table(notes, claims) if study.is_table else self._figures(notes, claims)

    def _table(self, notes: list[str], claims: Sequence[Claim]) -> list[Path]:
        study = self._runner.study
        results = [(cell, found) for cell in study.cells if (found := self._find(cell)) is not None]
        rows = table_rows(study, results, limit_epochs=self._runner.limit_epochs)
        page = table_markdown(study, rows, notes=notes) + _claims_markdown(claims)
        lines = [row.to_dict() | row.cost(study.printed_unit) for row in rows]
        return self._write({f"{study.name}.csv": as_csv(lines), f"{study.name}.md": page}, claims, lines)

    def _figures(self, notes: list[str], claims: Sequence[Claim]) -> list[Path]:
        study, limit = self._runner.study, self._runner.limit_epochs
        lines = [self._curve_line(cell, found) for cell in study.all_cells() if (found := self._find(cell))]
        warning = "\n" + " ".join(note for note in notes if note in (STAND_IN, QUICK))
        pictures = draw_study(study, self._find, self._out, limit_epochs=limit, note=warning.rstrip())
        shown = "\n".join(f"![{path.stem}]({path.name})" for path in pictures)
        page = (
            f"# {study.title}\n\n{shown}\n\n`score` is the mean of the metric over the last ten epochs; mean, min and "
            f"max of the seeds. Epsilon: cell, paper count, server, delta {DELTA:g}, after all epochs shown.\n\n"
            f"{as_markdown(lines)}\n" + "".join(f"- {note}\n" for note in notes) + "\n" + _claims_markdown(claims)
        )
        written = self._write({f"{study.name}.csv": as_csv(lines), f"{study.name}.md": page}, claims, lines)
        return [*pictures, *written]

    def _curve_line(self, cell: Cell, records: Sequence[Record]) -> dict[str, Any]:
        study, limit = self._runner.study, self._runner.limit_epochs
        scores = [score(record, study.metric, limit) for record in records]
        epochs = min(limit, *(len(record.history) for record in records))
        plan = records[0].plan
        b, beta = cell.equal_to or (cell.num_trials, cell.beta)
        none = cell.mechanism == "none"
        coupled = coupled_epsilon(plan, epochs)
        epsilon = paper_epsilon(plan, epochs)
        return {
            "mechanism": "NPQ" if none else cell.mechanism,
            "parties": cell.num_parties,
            "b": "" if none else b,
            "beta": "" if none else beta,
            "epochs": epochs,
            "seeds": len(records),
            "score_mean": f"{sum(scores) / len(scores):.4f}",
            "score_min": f"{min(scores):.4f}",
            "score_max": f"{max(scores):.4f}",
            "epsilon": short_epsilon(epsilon),
            **({"epsilon_with_coupled_rows": short_epsilon(coupled)} if plan.couples_rows else {}),
        }

    def _write(self, files: dict[str, str], claims: Sequence[Claim], lines: list[dict[str, Any]]) -> list[Path]:
        study = self._runner.study
        tested = sum(claim.p_value is not None for claim in claims)
        summary = {
            "study": study.name,
            "noise": SIMULATED,
            "stand_in": self._runner.uses_stand_in,
            "quick": study.quick,
            "limit_epochs": self._runner.limit_epochs,
            "rows": lines,
            "claims": [claim.to_dict(tested) for claim in claims],
        }
        files[f"{study.name}.json"] = json.dumps(summary, indent=1) + "\n"
        for name, text in files.items():
            write_atomically(self._out / name, text)
        return [self._out / name for name in files]


def _claims_markdown(claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    tested = sum(claim.p_value is not None for claim in claims)
    return (
        "## Claims\n\n"
        f"Exact one-sided tests over seeds; a claim holds if its p is at most {FALSE_ALARM:g}/{tested}, so that the "
        f"chance of any claim of this page holding by luck is at most {FALSE_ALARM:g}.\n\n"
        + as_markdown([claim.to_dict(tested) for claim in claims])
    )

"""Publication of finished runs: a CSV and a Markdown page per table, a picture and a page per figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pbmvfl._files import write_atomically
from pbmvfl.research.reproduction.claims import FALSE_ALARM, Claim, score, study_claims
from pbmvfl.research.reproduction.figures import draw_study
from pbmvfl.research.reproduction.records import EPSILON_NOTE, Record
from pbmvfl.research.reproduction.studies import Cell
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

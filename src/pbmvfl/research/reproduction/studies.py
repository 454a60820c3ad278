"""Studies, one per table or figure: settings, configurations and printed values, from `configs/NAME.json`.

Imports nothing but the plan, so that a machine with torch and numpy alone can read a study.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan

#: In the order of the paper.
STUDIES = (
    "table1",
    "table4",
    "table6",
    "figure-activity",
    "figure-phishing",
    "figure-cifar",
    "figure-modelnet",
    "figure-imagenet",
)
Mechanism = Literal["pbm", "none", "ldp", "ldp-calibrated"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration: a mechanism with its numbers, and the values that the paper prints for it."""

    mechanism: Mechanism
    num_parties: int
    num_trials: int = 1
    beta: float = 0.25
    #: For `ldp-calibrated`: the (b, beta) of the PBM whose epsilon it has; its own two numbers only set its variance.
    equal_to: tuple[int, float] | None = None
    printed_epochs: int | None = None
    printed_cost: float | None = None
    #: Whether the table prints a row for it; an infinite one has printed_epochs None.
    printed: bool = False

    @property
    def name(self) -> str:
        """Return the name of its records, which is also part of the file name of its weights."""
        if self.mechanism == "none":
            return f"m{self.num_parties}-npq"
        b, beta = self.equal_to or (self.num_trials, self.beta)
        return f"m{self.num_parties}-{self.mechanism}-b{b}-beta{beta:g}"

    def plan_fields(self) -> dict[str, Any]:
        if self.mechanism == "none":
            return {"mechanism": "none", "num_parties": self.num_parties}
        kind = "pbm" if self.mechanism == "pbm" else "ldp"
        return {
            "mechanism": kind,
            "num_parties": self.num_parties,
            "num_trials": self.num_trials,
            "beta": self.beta,
        }


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a figure, whose curves differ by b or by beta."""

    title: str
    told_apart_by: Literal["num_trials", "beta"]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Table (cells with printed values) or figure (panels); `metric` is what its curves show."""

    name: str
    title: str
    dataset: str
    plan: dict[str, Any]
    limit_epochs: int
    metric: str
    #: Tables: training stops when this metric of the train set reaches this value.
    target: tuple[str, float] | None = None
    printed_unit: str = ""
    cells: tuple[Cell, ...] = ()
    figures: dict[str, tuple[Panel, ...]] = field(default_factory=dict)
    #: The epochs after which LDP at equal epsilon has the epsilon of its PBM: the paper's, where we show fewer.
    calibrated_at: int = 0
    #: Training rows to keep, chosen by the public seed; None for all of them.
    num_samples: int | None = None
    #: Random crop and flip of the whole picture before it is cut.
    augment: bool = False
    notes: tuple[str, ...] = ()
    quick: bool = False

    @property
    def is_table(self) -> bool:
        return self.target is not None

    def all_cells(self) -> tuple[Cell, ...]:
        """Return every configuration once."""
        found = list(self.cells)
        for panels in self.figures.values():
            found += [cell for panel in panels for cell in panel.cells]
        return tuple(dict.fromkeys(found))

    def make_plan(self, cell: Cell, *, seed: int, sizes: dict[str, int]) -> Plan:
        """Return the plan of one configuration on data of these sizes."""
        fields = {**self.plan, "num_epochs": self.limit_epochs, **cell.plan_fields(), **sizes, "seed": seed}
        return Plan.from_dict(fields)

    def quickened(self) -> Study:
        """Return a smoke run of seconds: few rows and epochs, one configuration of each kind, one panel per figure."""
        pictures = self.dataset in ("cifar10", "imagenet100")
        kinds = ("pbm", "none", "ldp") if pictures else ("pbm", "none", "ldp", "ldp-calibrated")
        views = self.dataset == "modelnet10"
        plan = {**self.plan, "batch_size": 4 if pictures else 10 if views else 40}
        plan["embedding_dim"] = min(plan["embedding_dim"], 16)
        return replace(
            self,
            plan=plan,
            limit_epochs=2 if self.dataset in ("activity", "phishing") else 1,
            num_samples=8 if pictures else 24 if views else 200,
            cells=_last_of_each(self.cells, kinds),
            figures={
                name: tuple(replace(panel, cells=_last_of_each(panel.cells, kinds)) for panel in panels[-1:])
                for name, panels in self.figures.items()
            },
            quick=True,
        )


def _last_of_each(cells: tuple[Cell, ...], kinds: tuple[str, ...]) -> tuple[Cell, ...]:
    same = ([cell for cell in cells if cell.mechanism == kind] for kind in kinds)
    return tuple(found[-1] for found in same if found)


def studies_folder() -> Traversable:
    """Return the folder of the package's own configs."""
    return files("pbmvfl.research.reproduction") / "configs"


def read_study(name: str, folder: Path | None = None) -> Study:
    """Read the study of this name from the package, or from a folder of own configs."""
    config = (studies_folder() if folder is None else folder) / f"{name}.json"
    try:
        values = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{config} cannot be read ({error}); --studies must name a folder with one") from error
    parties = values.get("num_parties", 0)
    figures = {
        name: tuple(
            Panel(
                title=panel["title"],
                told_apart_by=panel["told_apart_by"],
                cells=tuple(_read_curves(panel)),
            )
            for panel in panels
        )
        for name, panels in values.get("figures", {}).items()
    }
    target = values.get("target")
    return Study(
        name=values["name"],
        title=values["title"],
        dataset=values["dataset"],
        plan=values["plan"],
        limit_epochs=values["limit_epochs"],
        metric=values["metric"],
        target=(target["metric"], target["value"]) if target else None,
        printed_unit=values.get("printed_unit", ""),
        cells=tuple(_read_cell(cell, parties) for cell in values.get("cells", [])),
        figures=figures,
        calibrated_at=values.get("calibrated_at", values["limit_epochs"]),
        num_samples=values.get("num_samples"),
        augment=values.get("augment", False),
        notes=tuple(values.get("notes", [])),
    )


def _read_cell(values: dict[str, Any], parties: int) -> Cell:
    if values.get("mechanism") == "none":
        numbers: dict[str, Any] = {"mechanism": "none"}
    else:
        numbers = {"mechanism": "pbm", "num_trials": values["b"], "beta": values["beta"]}
    return Cell(
        **numbers,
        num_parties=parties,
        printed_epochs=values["printed_epochs"],
        printed_cost=values["printed_cost"],
        printed=True,
    )


def _read_curves(panel: dict[str, Any]) -> Iterator[Cell]:
    """Yield a panel's cells: `pbm` and `ldp` list (b, beta), `ldp_calibrated` (b, beta, b', beta'), its own last."""
    parties = panel["num_parties"]
    for b, beta in panel["pbm"]:
        yield Cell(mechanism="pbm", num_parties=parties, num_trials=b, beta=beta)
    yield Cell(mechanism="none", num_parties=parties)
    for b, beta in panel["ldp"]:
        yield Cell(mechanism="ldp", num_parties=parties, num_trials=b, beta=beta)
    for b, beta, own_b, own_beta in panel["ldp_calibrated"]:
        yield Cell(mechanism="ldp-calibrated", num_parties=parties, num_trials=own_b, beta=own_beta, equal_to=(b, beta))

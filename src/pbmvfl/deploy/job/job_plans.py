"""From a federation's budget and what alignment made public to plans: numbers of rows, classes and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pbmvfl._files import read_object
from pbmvfl.deploy.alignment.runner import LabelRows
from pbmvfl.deploy.site.federation_file import FILE, FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError, PlanError
from pbmvfl.federation.model_files import ServerPart
from pbmvfl.federation.serving import Release, release_for, serving_plan
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.units import Unit

DEFAULT_EPSILON = 8.0


def training_plan(federation: FederationFile, rows: LabelRows, **choices: Any) -> Plan:
    """The plan within federation.toml's budget; `choices` overrule it. Nothing but released sums is looked at."""
    asked = {"epsilon": DEFAULT_EPSILON, **federation.plan, **choices}
    try:
        return Plan.for_budget(
            **{
                "num_parties": len(federation.parties),
                "num_samples": rows.num_rows,
                "num_classes": len(rows.class_names),
                "columns": max(rows.widths),
                "evaluation": str(Evaluation.NONE),
                **asked,
            }
        )
    except TypeError as error:
        raise PlanError(f"[plan] of {FILE} has a name that no plan has: {error}") from error


def read_plan(path: Path, federation: FederationFile, rows: LabelRows) -> Plan:
    """A plan that was written before, if it is for these parties and rows."""
    plan = Plan.from_dict(read_object(path, {}, PlanError))
    fits = {
        "num_parties": (plan.num_parties, len(federation.parties)),
        "num_samples": (plan.num_samples, rows.num_rows),
        "num_classes": (plan.num_classes, len(rows.class_names)),
    }
    for name, (planned, there) in fits.items():
        if planned != there:
            raise FederationError(f"{path}: {name}={planned}, the aligned rows have {there}; make the plan for them")
    if plan.evaluation is Evaluation.SIMULATOR:
        raise FederationError(f"{path}: evaluation=simulator looks at exact sums, which nobody sees here; use none")
    return plan


def release_of(part: ServerPart, *, epsilon: float | None, delta: float | None, unit: Unit | str) -> Release:
    """How the label holder's part of a model has a row released."""
    tables = any(name.startswith("votes.table.") for name in part.state)
    delta = usual_delta(part.plan.num_samples) if delta is None else delta
    return release_for(part.plan, epsilon=epsilon, delta=delta, unit=unit, has_tables=tables)


def prediction_plan(
    site_folder: SiteFolder,
    run: str,
    rows: LabelRows,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    unit: Unit | str = Unit.CELL,
) -> Plan:
    """The plan of asking a trained model about aligned rows."""
    part = ServerPart.load(site_folder.model(run))
    release = release_of(part, epsilon=epsilon, delta=delta, unit=unit)
    return serving_plan(part.plan, model=part.model, num_rows=rows.num_rows, release=release)

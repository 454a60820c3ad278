"""Plans of a federation, from its privacy budget and the public facts of an alignment."""

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
from pbmvfl.protocol.server import has_fusion

DEFAULT_EPSILON = 8.0


def training_plan(federation: FederationFile, rows: LabelRows, **choices: Any) -> Plan:
    """Return the training plan within federation.toml's budget. Only released sums are evaluated.

    Args:
        federation: The federation, with its budget.
        rows: The aligned rows, of which only public counts are used.
        **choices: Arguments of `Plan.for_budget` that override federation.toml's.

    Raises:
        PlanError: If there is no such plan.
    """
    asked = {"epsilon": DEFAULT_EPSILON, **federation.plan, **choices}
    if asked.get("label_epsilon") == "none":  # TOML has no other word for it
        asked["label_epsilon"] = None
    try:
        return Plan.for_budget(
            num_parties=len(federation.parties),
            num_samples=rows.num_rows,
            num_classes=len(rows.class_names),
            columns=max(rows.widths),
            kinds=rows.kinds,
            **{"evaluation": str(Evaluation.NONE), **asked},
        )
    except TypeError as error:
        raise PlanError(
            f"[plan] of {FILE} has a name that no plan has, or that the aligned rows give: {error}"
        ) from error


def read_plan(path: Path, federation: FederationFile, rows: LabelRows) -> Plan:
    """Read a plan from a file, and check that it fits these parties and rows.

    Raises:
        FederationError: If it does not fit.
    """
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
    """Return how the label holder's part of a model has a row released."""
    delta = usual_delta(part.plan.num_samples) if delta is None else delta
    return release_for(part.plan, epsilon=epsilon, delta=delta, unit=unit, has_fusion=has_fusion(part.state))


def prediction_plan(
    site_folder: SiteFolder,
    run: str,
    rows: LabelRows,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    unit: Unit | str = Unit.CELL,
) -> Plan:
    """Return the plan that predicts aligned rows with a trained model.

    Args:
        site_folder: The label holder's folder.
        run: The run that trained the model.
        rows: The aligned rows to predict.
        epsilon: Privacy budget of a row; None for the model's own release.
        delta: Delta of the budget; None for the usual one of the training rows.
        unit: Unit that the budget protects.
    """
    part = ServerPart.load(site_folder.model(run))
    release = release_of(part, epsilon=epsilon, delta=delta, unit=unit)
    return serving_plan(part.plan, model=part.model, num_rows=rows.num_rows, release=release)

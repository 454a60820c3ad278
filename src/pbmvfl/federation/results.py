"""Result of a run, and its file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbmvfl._files import Kinds, checked_object, read_object
from pbmvfl._text import counted, for_json, html_table, short_repr
from pbmvfl.errors import RunFolderError
from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.metrics_summary import notes_on_classes, notes_on_predictions
from pbmvfl.federation.release_log import ReleasedRounds
from pbmvfl.plan.groups import Algorithm, Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import RowUses
from pbmvfl.privacy.accounting import TrainingRun
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.table import PrivacyTable, privacy_table
from pbmvfl.privacy.units import Adversary
from pbmvfl.training.metrics import ClassFigures, Majority, majority
from pbmvfl.wire.traffic import Traffic, human_bytes

if TYPE_CHECKING:
    from pbmvfl.federation.model import FederatedModel
    from pbmvfl.training.fusion import FusionModel

OWN_WEIGHTS = (
    "own networks: their first weights are not the plan's public ones, so they are charged as weights that know the "
    "rows; declare public ones in the plan (first_weights) to be charged less"
)
#: The version of result.json. Version 1 had no number, and counted uses of train and test rows without saying which;
#: version 2 had figures without the classes, the majority rate and what the protocol itself saw.
VERSION = 3
EXACT, SIMULATED, NOTHING = "exact sums", "simulated releases", "nothing"
TRAFFIC_KINDS: Kinds = dict.fromkeys(("bytes_setup", "bytes_up", "bytes_down", "rounds"), int)
_KINDS: Kinds = {
    "plan": dict,
    "metrics": dict,
    "history": list,
    "traffic": dict,
    "seconds": int | float,
    "sessions": list,
    "row_uses": dict,
    "noise_is_seeded": bool,
    "stopped": str,
}
_CLASS: Kinds = {
    "name": str,
    "train": int,
    "test": int,
    "train_predicted": int | None,
    "test_predicted": int | None,
    "train_recall": int | float | None,
    "test_recall": int | float | None,
}


@dataclass(frozen=True, kw_only=True)
class FusionFigures:
    """The fusion model in words, and its accuracy on fusion rows that were held out from it."""

    name: str
    description: str
    accuracy: float
    #: Accuracy of the most frequent class on the same rows.
    majority: float
    beats_majority: bool

    @classmethod
    def of(cls, model: FusionModel) -> FusionFigures:
        """Return the figures of a fitted model."""
        return cls(
            name=str(model.name),
            description=model.description,
            accuracy=model.held_out["accuracy"],
            majority=model.majority,
            beats_majority=model.beats_majority,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """Metrics, history and measured costs of a run that has ended."""

    plan: Plan
    metrics: dict[str, float]
    history: tuple[EpochLine, ...]
    traffic: Traffic
    seconds: float
    sessions: tuple[ReleasedRounds, ...]
    #: How often rows were released and updated, by kind of round, over all sessions.
    row_uses: tuple[RowUses, ...]
    #: Why the run ended before its plan did; empty if it did not.
    stopped: str = ""
    #: True only in tests: the noise is known, so epsilon is infinite.
    noise_is_seeded: bool = False
    #: Every class with its rows and the last evaluation of it; empty in results of earlier versions.
    classes: tuple[ClassFigures, ...] = ()
    #: Confusion matrix, precision-recall curve and calibration of the last evaluation, by split; see `score_figures`.
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The largest class score of the last evaluation; infinity if one was no number.
    largest_score: float | None = None
    #: Whether training diverged, which ended the run; `stopped` says how.
    diverged: bool = False
    #: The model that reads releases; None where there are no fusion rows, or the run ended before they were released.
    fusion: FusionFigures | None = None
    #: The trained model, as `Federation.fit` gives it; a result that was read from a file has none.
    model: FederatedModel | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        figures = (f"{name}={value:.4f}" for name, value in self.metrics.items())
        ended = "diverged" if self.diverged else "stopped early" if self.stopped else ""
        return short_repr("Result", str(self.plan.algorithm), *figures, f"{self.seconds:.1f} s", ended)

    def _repr_html_(self) -> str:
        figures = [(name.replace("_", " "), f"{value:.4f}") for name, value in self.metrics.items()]
        moved = human_bytes(self.traffic.bytes_up + self.traffic.bytes_down)
        rows = [*figures, ("rounds", f"{self.traffic.rounds:,} in {self.seconds:.1f} s, {moved}")]
        rows += [("note", note) for note in self.notes]
        return html_table(f"training by {self.plan.algorithm}", rows) + self.privacy()._repr_html_()

    def privacy(self, *, delta: float | None = None, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
        """Return the epsilon that the run spent, for every unit, adversary and accounting.

        Args:
            delta: Delta of every epsilon; None for the default of `Plan.privacy`.
            adversaries: Whom to count against; None for the usual ones: server, party, server with others.
        """
        delta = usual_delta(self.plan.num_samples) if delta is None else delta
        return privacy_table(
            self.training_run, delta=delta, adversaries=adversaries, noise_is_known=self.noise_is_seeded
        )

    @property
    def training_run(self) -> TrainingRun:
        """The run as the account sees it."""
        return self.plan.training_run(self.row_uses, public_start=self.public_start)

    @property
    def public_start(self) -> bool:
        """True if every session began with public weights, or resumed one that did."""
        return all(session.public_start for session in self.sessions)

    @property
    def measured_on(self) -> str:
        """Source of `metrics`: sums or releases that only a simulator sees, or what the server itself reads."""
        if self.plan.evaluation is Evaluation.SIMULATOR:
            return EXACT if self.fusion is None else SIMULATED
        return self.plan.releases[-1].reading if self.plan.releases else NOTHING

    @property
    def released(self) -> dict[str, float]:
        """Metrics from what the protocol itself saw. One that is missing was not measured, and needs a release."""
        if self.measured_on not in (EXACT, SIMULATED):
            return {name: value for name, value in self.metrics.items() if name != "train_loss"}
        return self.history[-1].released if self.history else {}

    @property
    def majority(self) -> dict[str, Majority]:
        """Rate of the most frequent class by split; empty in results of earlier versions."""
        return majority(self.classes)

    @property
    def positive_class(self) -> str | None:
        """Class of the precision-recall curve; None for more than two classes."""
        return self.classes[1].name if len(self.classes) == 2 else None

    @property
    def notes(self) -> list[str]:
        """Notes for a reader of the figures: how they were measured, then warnings."""
        return [*self._notes_on_the_run, *self.warnings]

    @property
    def warnings(self) -> list[str]:
        """Signs that the figures promise more than the model keeps."""
        found = notes_on_predictions(
            self.classes, self.metrics, largest_score=self.largest_score, plan=self.plan, diverged=self.diverged
        )
        if self.fusion is not None and not self.fusion.beats_majority:
            found.append(
                f"the fusion model is not better than the most frequent class ({self.fusion.majority:.4f}) on fusion "
                "rows that were held out from it: it predicts shares of classes; more rows or a larger epsilon may help"
            )
        return [*notes_on_classes(self.classes), *found]

    @property
    def how_measured(self) -> str:
        """Note on what the metrics were measured on, or on why there are none."""
        if self.plan.evaluation is Evaluation.NONE:
            seen = "" if not self.metrics else f" but what training's own {self.measured_on} show"
            return f"the plan measures nothing{seen}; `pbmvfl evaluate RUN` does, by a charged release"
        if not self.metrics:
            return "nothing was measured: the run ended before it could be evaluated"
        if self.plan.evaluation is Evaluation.SIMULATOR:
            return (
                f"metrics come from {self.measured_on} that no role of the protocol sees; they are outside the epsilon"
            )
        noisy = "noisy release" if self.plan.releases[-1].is_private else "release"
        trained = f"train metrics come from the training rounds' own {self.plan.releases[0].reading}; test metrics "
        trained += f"from one more {noisy}"
        if self.plan.algorithm is Algorithm.STAGED:
            trained = f"there are no train metrics, as local rounds release nothing; test metrics come from one {noisy}"
        return f"{trained} of every test row"

    @property
    def _notes_on_the_run(self) -> list[str]:
        notes = [self.how_measured]
        if self.diverged:
            notes.append(f"the run diverged and was ended early: {self.stopped}")
        elif self.stopped:
            notes.append(f"a party's ledger ended the run early: {self.stopped}")
        if self.noise_is_seeded:
            notes.append("the noise was seeded for a test: epsilon is infinite")
        if not self.public_start:
            notes.append(OWN_WEIGHTS)
        if len(self.sessions) > 1:
            notes.append("the run was resumed: rounds that ran again count as further releases")
        if lost := self._rounds_without_traffic:
            notes.append(
                f"traffic is what checkpoints kept of it: the bytes of up to {counted(lost, 'round')}, sent between a "
                "checkpoint and the end of their session, are not in it"
            )
        return notes

    @property
    def _rounds_without_traffic(self) -> int:
        """Rounds that a session may have sent and its successor ran again."""
        pairs = itertools.pairwise(self.sessions)
        return sum(max(0, session.charged_until - following.first_round) for session, following in pairs)

    def to_dict(self, *, delta: float | None = None) -> dict[str, Any]:
        """Return plain values for JSON, with epsilons at this delta, or at the default of `Plan.privacy`.

        Args:
            delta: Delta of the epsilons; None: the default of `Plan.privacy`.
        """
        return {
            "version": VERSION,
            "metrics": self.metrics,
            "measured_on": self.measured_on,
            "released": self.released,
            "majority": {split: {"class": each.name, "rate": each.rate} for split, each in self.majority.items()},
            "positive_class": self.positive_class,
            "classes": [each.to_dict() for each in self.classes],
            **({"scores": self.scores} if self.scores else {}),
            "largest_score": for_json(self.largest_score),
            "diverged": self.diverged,
            **({} if self.fusion is None else {"fusion": asdict(self.fusion)}),
            "traffic": self.traffic.to_dict(),
            "seconds": round(self.seconds, 3),
            "row_uses": {use.kind.name: use.to_dict() for use in self.row_uses},
            "sessions": [session.to_dict() for session in self.sessions],
            "noise_is_seeded": self.noise_is_seeded,
            "public_start": self.public_start,
            "stopped": self.stopped,
            "privacy": self.privacy(delta=delta).to_dicts(),
            "notes": self.notes,
            "plan": self.plan.to_dict(),
            "plan_hash": self.plan.hash.hex(),
            "history": [line.to_dict() for line in self.history],
        }

    def to_json(self, *, delta: float | None = None) -> str:
        """Return the text of result.json, with epsilons at this delta, or at the default of `Plan.privacy`.

        Args:
            delta: Delta of the epsilons; None: the default of `Plan.privacy`.
        """
        return json.dumps(self.to_dict(delta=delta), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path | str) -> Result:
        """Read a result.json.

        Args:
            path: A result.json.

        Returns:
            The result.

        Raises:
            RunFolderError: The file is missing, damaged or of a newer version.
        """
        values = read_object(Path(path), _KINDS, RunFolderError)
        path = Path(path)
        plan = Plan.from_dict(values["plan"])
        traffic = checked_object(values["traffic"], TRAFFIC_KINDS, path, RunFolderError)
        return cls(
            plan=plan,
            metrics=values["metrics"],
            history=tuple(EpochLine.from_dict(line, path, RunFolderError) for line in values["history"]),
            traffic=Traffic(**{name: traffic[name] for name in TRAFFIC_KINDS}),
            seconds=values["seconds"],
            sessions=tuple(ReleasedRounds.from_value(session, path, RunFolderError) for session in values["sessions"]),
            row_uses=_read_uses(values, plan, path),
            noise_is_seeded=values["noise_is_seeded"],
            stopped=values["stopped"],
            **_read_figures(values, path),
        )


def _read_figures(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Read what version 3 added to the metrics; nothing from earlier versions."""
    if values.get("version") != VERSION:
        return {}
    kinds: Kinds = {"classes": list, "largest_score": int | float | str | None, "diverged": bool}
    checked_object(values, kinds, path, RunFolderError)
    unsaid = dict.fromkeys(each.name for each in fields(ClassFigures))
    classes = [
        checked_object({**unsaid, **checked_object(each, {}, path, RunFolderError)}, _CLASS, path, RunFolderError)
        for each in values["classes"]
    ]
    largest = values["largest_score"]
    return {
        "classes": tuple(ClassFigures(**{name: each[name] for name in unsaid}) for each in classes),
        "scores": _read_scores(values.get("scores", {}), path),
        "largest_score": math.inf if largest == "inf" else largest,
        "diverged": values["diverged"],
        "fusion": None if "fusion" not in values else _read_fusion(values["fusion"], path),
    }


def _read_scores(value: object, path: Path) -> dict[str, dict[str, Any]]:
    """Read what `score_figures` gave, which results may lack: lists of lists of numbers."""
    found = checked_object(value, {}, path, RunFolderError)
    for split in found.values():
        for name, lines in checked_object(split, {}, path, RunFolderError).items():
            if not isinstance(lines, list) or not all(isinstance(line, list) and _are_numbers(line) for line in lines):
                raise RunFolderError(f"{path} is damaged: {name} must be lists of numbers; restore it from a copy")
    return found


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _read_fusion(value: object, path: Path) -> FusionFigures:
    kinds: Kinds = {
        "name": str,
        "description": str,
        "accuracy": int | float,
        "majority": int | float,
        "beats_majority": bool,
    }
    said = checked_object(value, kinds, path, RunFolderError)
    return FusionFigures(**{name: said[name] for name in kinds})


def _read_uses(values: dict[str, Any], plan: Plan, path: Path) -> tuple[RowUses, ...]:
    """Read uses by kind of round. Version 1 has train rows of joint rounds and test rows of predictions."""
    version = values.get("version", 1)
    if version not in (1, 2, VERSION):
        raise RunFolderError(f"{path} has version={version!r}; this program reads versions 1 to {VERSION}; update it")
    found = values["row_uses"]
    if version == 1:
        old = checked_object(found, {"train": int, "test": int}, path, RunFolderError)
        totals = {"joint": (old["train"], plan.num_samples), "prediction": (old["test"], plan.num_test_samples)}
        found = {
            kind.name: {
                "releases": totals[kind.name][0],
                "updates": totals[kind.name][0] if kind.updates else 0,
                "total_releases": totals[kind.name][0] * totals[kind.name][1],
            }
            for kind in plan.schedule.kinds
        }
    checked_object(found, {kind.name: dict for kind in plan.schedule.kinds}, path, RunFolderError)
    counts: Kinds = dict.fromkeys(("releases", "updates", "total_releases"), int)
    return tuple(
        RowUses(kind=kind, **checked_object(found[kind.name], counts, path, RunFolderError))
        for kind in plan.schedule.kinds
    )

"""What a run gives back, and how it is written down."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbmvfl.errors import RunFolderError
from pbmvfl.json_files import Kinds, checked_object, read_object
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import Evaluation, Training
from pbmvfl.privacy.accounting import TrainingRun
from pbmvfl.privacy.table import PrivacyTable, privacy_table
from pbmvfl.privacy.units import Adversary
from pbmvfl.runs.history import EpochLine
from pbmvfl.runs.release_log import ReleasedRounds
from pbmvfl.schedule import RowUses
from pbmvfl.wire.traffic import Traffic

if TYPE_CHECKING:
    from pbmvfl.model.federated import FederatedModel

#: The delta of epsilons where nobody asked for another.
DEFAULT_DELTA = 1e-5
OWN_WEIGHTS = (
    "own networks: their first weights are not the plan's public ones, so they are charged as weights that know the "
    "rows; declare public ones in the plan (first_weights) to be charged less"
)
#: The version of result.json. Version 1 had no number, and counted uses of train and test rows without saying which.
VERSION = 2
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
    #: True only in tests: somebody knows the noise, so epsilon is infinite.
    noise_is_seeded: bool = False
    #: What was trained, as `Federation.fit` gives it; a result that was read from a file has none.
    model: FederatedModel | None = field(default=None, repr=False, compare=False)

    def privacy(self, *, delta: float = DEFAULT_DELTA, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
        """What the run spent, for every unit, adversary and accounting."""
        return privacy_table(
            self.training_run, delta=delta, adversaries=adversaries, noise_is_known=self.noise_is_seeded
        )

    @property
    def training_run(self) -> TrainingRun:
        """What the account sees of the run."""
        return self.plan.training_run(self.row_uses, public_start=self.public_start)

    @property
    def public_start(self) -> bool:
        """Whether every session began with public weights, or went on from such a one."""
        return all(session.public_start for session in self.sessions)

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures must know."""
        notes = []
        if self.plan.evaluation is Evaluation.SIMULATOR:
            notes.append("metrics come from exact sums that no role of the protocol sees; they are outside the epsilon")
        else:
            trained = "train metrics come from the training rounds' own noisy sums; test metrics from one more noisy"
            if self.plan.training is Training.LOCAL:
                trained = (
                    "there are no train metrics, as local rounds release nothing; test metrics come from one noisy"
                )
            notes.append(f"{trained} release of every test row")
        if self.stopped:
            notes.append(f"a party's ledger ended the run early: {self.stopped}")
        if self.noise_is_seeded:
            notes.append("the noise was seeded for a test: epsilon is infinite")
        if not self.public_start:
            notes.append(OWN_WEIGHTS)
        if len(self.sessions) > 1:
            notes.append("the run was resumed: rounds that ran again count as further releases")
        if lost := self._rounds_without_traffic:
            notes.append(
                f"traffic is what checkpoints kept of it: the bytes of up to {lost} rounds, sent between a checkpoint "
                "and the end of their session, are not in it"
            )
        return notes

    @property
    def _rounds_without_traffic(self) -> int:
        """Rounds that a session may have sent and that its successor started before."""
        pairs = itertools.pairwise(self.sessions)
        return sum(max(0, session.charged_until - following.first_round) for session, following in pairs)

    def to_dict(self, *, delta: float = DEFAULT_DELTA) -> dict[str, Any]:
        """Plain values for JSON, with epsilons at this delta."""
        return {
            "version": VERSION,
            "metrics": self.metrics,
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

    def to_json(self, *, delta: float = DEFAULT_DELTA) -> str:
        return json.dumps(self.to_dict(delta=delta), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path | str) -> Result:
        """What `to_json` wrote there."""
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
        )


def _read_uses(values: dict[str, Any], plan: Plan, path: Path) -> tuple[RowUses, ...]:
    """Uses by kind of round; of version 1, uses of train rows in joint rounds and of test rows in predictions."""
    version = values.get("version", 1)
    if version not in (1, VERSION):
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

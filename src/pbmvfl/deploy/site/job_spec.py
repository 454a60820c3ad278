"""Job specification and job result, each in one exact form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.crypto.key_exchange import RUN_ID_BYTES
from pbmvfl.deploy.site.folder import check_name
from pbmvfl.errors import FederationError, OrderError, PlanError, RunFolderError
from pbmvfl.plan.plan import Plan

# --- Job spec: names and public numbers, in one exact form ---
# It travels as one text. Any other text is refused before any process of the job exists.


FORMAT = 1
#: In characters; a plan has about 3,000.
LONGEST = 100_000


class Work(StrEnum):
    """Kind of work of a job."""

    ALIGN = "align"  #: find the common rows, and put them in one order
    TRAIN = "train"  #: run a plan
    PREDICT = "predict"  #: predict with the model that a run trained


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Parameters of one job."""

    work: Work
    federation: str
    #: The alignment that is made, trained on, or predicted.
    alignment: str
    #: The run that is trained, or whose model predicts; empty where rows are aligned.
    run: str = ""
    #: By which checkpoints and ledgers know the run, 8 bytes in hexadecimal; empty where rows are aligned.
    run_id: str = ""
    #: None where rows are aligned.
    plan: Plan | None = None

    def __post_init__(self) -> None:
        check_name(self.federation, "federation")
        check_name(self.alignment, "alignment")
        if self.work is Work.ALIGN:
            if self.run or self.run_id or self.plan is not None:
                raise OrderError("work=align has no run and no plan")
            return
        check_name(self.run, "run")
        if len(self.run_id) != 2 * RUN_ID_BYTES or set(self.run_id) - set("0123456789abcdef"):
            raise OrderError(f"run_id={self.run_id!r} must be {2 * RUN_ID_BYTES} hexadecimal digits")
        if self.plan is None or bool(self.plan.model) != (self.work is Work.PREDICT):
            raise OrderError(f"work={self.work}: it needs a plan that {self.work}s, and no other")

    @property
    def run_plan(self) -> Plan:
        """The plan of a job that trains or predicts."""
        assert self.plan is not None
        return self.plan

    def to_text(self) -> str:
        """Return the canonical text of this job spec."""
        plan = None if self.plan is None else self.plan.to_dict()
        return json.dumps({"format": FORMAT, **vars(self), "plan": plan}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> JobSpec:
        """Parse a job spec.

        Raises:
            OrderError: If the text is not the canonical text of a job spec. The message is public.
        """
        if not isinstance(text, str) or len(text) > LONGEST:
            raise OrderError(f"an order is a text of at most {LONGEST} characters")
        try:
            said: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise OrderError("the order is no JSON") from None
        names = {"format", "work", "federation", "alignment", "run", "run_id", "plan"}
        if not isinstance(said, dict) or set(said) != names:
            raise OrderError(f"an order has exactly these names: {', '.join(sorted(names))}")
        if (form := said.pop("format")) != FORMAT or isinstance(form, bool):
            raise OrderError(f"format={str(form)[:20]!r}: this version reads format {FORMAT}")
        if said["work"] not in tuple(Work):
            raise OrderError(f"work={str(said['work'])[:20]!r}; permitted: {', '.join(Work)}")
        if not all(isinstance(said[name], str) for name in ("federation", "alignment", "run", "run_id")):
            raise OrderError("federation, alignment, run and run_id are texts")
        try:
            said["plan"] = None if said["plan"] is None else Plan.from_dict(said["plan"])
            spec = cls(**{**said, "work": Work(said["work"])})
        except (PlanError, FederationError) as error:
            raise OrderError(str(error)) from error
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            raise OrderError("the order's plan is not of the form that this version writes") from None
        if spec.to_text() != text:
            raise OrderError("the order is not written as this version writes it")
        return spec


# --- How one job ended, as the label holder's site wrote it down ---
# Whether a run is done is said here, and nowhere else.


_LAST, _DONE = "outcome.json", "done.json"


class Ending(StrEnum):
    """Ending of a job."""

    DONE = "done"  #: everything that was asked for is there, at every site
    STOPPED = "stopped"  #: a limit of a party's owner, or a loss that went astray: nothing more is to be had
    REFUSED = "refused"  #: a site said no, and will say no again
    FAILED = "failed"  #: a site was lost: a new job goes on from the newest common checkpoint


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Result of a job."""

    job: str
    ending: Ending
    words: str = ""

    def write(self, folder: Path) -> None:
        """Write the result beside the run's other files, and a final one also to a file of its own."""
        make_private_folder(folder)
        text = json.dumps(asdict(self)) + "\n"
        if self.ending in (Ending.DONE, Ending.STOPPED):
            write_atomically(folder / _DONE, text, mode=PRIVATE_FILE)
        write_atomically(folder / _LAST, text, mode=PRIVATE_FILE)


def last_result(folder: Path) -> JobResult | None:
    """Return the result of the newest job that ended, or None."""
    return _read(folder / _LAST)


def final_result(folder: Path) -> JobResult | None:
    """Return the result of the run if it is final, or None."""
    return _read(folder / _DONE)


def forget(folder: Path) -> None:
    """Remove the results of earlier work under the same name."""
    for name in (_LAST, _DONE):
        (folder / name).unlink(missing_ok=True)


def _read(path: Path) -> JobResult | None:
    if not path.is_file():
        return None
    said = read_object(path, {"job": str, "ending": str, "words": str}, RunFolderError)
    if said["ending"] not in tuple(Ending):
        raise RunFolderError(f"{path} has ending={said['ending']!r}; permitted: {', '.join(Ending)}")
    return JobResult(job=said["job"], ending=Ending(said["ending"]), words=said["words"])

"""policy.toml: what one organisation accepts. Its owner writes it; it is read here and never sent.

A party states where its rows are, what they may spend, and which plans it takes part in. The label holder's file is
smaller: where its rows and labels are, what parties may learn of labels, and when it works. Where it says nothing about
labels, they are drawn with the usual label epsilon or a smaller one, never used in clear, and have no limit over all
runs. `pbmvfl policy template` writes one to start from.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, time
from pathlib import Path
from typing import Any

from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.toml_tables import ANY, NAMES, NUMBER, SWITCH, TEXT, Kind, TomlTables, text, whole
from pbmvfl.errors import PbmvflError, PolicyFileError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON
from pbmvfl.plan.policy import Policy
from pbmvfl.privacy.units import COLUMN_UNITS, Unit

#: In bytes; one that is filled in has about 2,000.
LARGEST = 1 << 20
#: Name that the label holder's ledger counts under, if its policy has none.
_USUAL_LABELS = "labels"
_HOURS = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9]")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*")
_DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,79}")
_NO_LIMIT = (
    "it has no [[limit]], and without one the rows could be asked about for ever; write what they may spend over all "
    'runs, such as:\n[[limit]]\nepsilon = 8\ndelta = 1e-5\nunit = "cell"\naccounting = "strict"'
)


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Location and naming of the organisation's rows."""

    file: Path
    #: The column of ids, by which rows of different organisations are put in one order.
    id: str
    #: None: all but the id and the label.
    columns: tuple[str, ...] | None = None
    #: Schema file, as `pbmvfl schema` writes it; None: columns are numbers.
    schema: Path | None = None
    #: Name that the ledger counts under.
    dataset: str = ""
    #: The owner's public name for the current state of the columns, or of the labels. Predicted rows keep their
    #: answers, and training rows their drawn labels, at no charge, until it changes: then all are drawn, and charged,
    #: anew.
    version: str = ""
    #: Column of labels; label holder only.
    label: str = ""
    #: The owner declares that no row is a person's, as in a trial: then a limit may be left out. The ledger counts all
    #: the same, and a limit in the ledger holds.
    made_up: bool = False


@dataclass(frozen=True)
class Hours:
    """Permitted hours by the site's own clock; they span midnight if the first is later than the second."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Hours:
        begin, _, end = text.partition("-")
        return cls(time.fromisoformat(begin), time.fromisoformat(end))

    def permit(self, now: datetime) -> bool:
        """Return whether a moment is within the hours."""
        clock = now.time()
        if self.begin <= self.end:
            return self.begin <= clock < self.end
        return clock >= self.begin or clock < self.end

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"


_CLOCK = Kind(
    'two times of the clock, such as "07:00-19:00"',
    lambda value: isinstance(value, str) and bool(_HOURS.fullmatch(value)) and value[:5] != value[6:],
    Hours.parse,
)


def _rule(default: Any, kind: Kind) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, kw_only=True)
class RunRules:
    """Limits on how often, when and how much may be requested, whatever the plan."""

    #: The most sessions of one run: each that is begun again may release rounds a second time.
    sessions: int = _rule(100, whole(1, 100_000))
    hours: Hours | None = field(default=None, metadata={"kind": _CLOCK})
    #: The most alignments that are ever made: each tells the label holder which of its ids are here.
    alignments: int = _rule(20, whole(0, 100_000))
    #: The most ids that the label holder may ask about in one of them.
    largest_alignment: int = _rule(10_000_000, whole(1, 10**9))
    #: The fewest rows in common: fewer would single out people.
    smallest_alignment: int = _rule(1, whole(1, 10**9))
    #: Whether a run is begun although a limit will end it.
    until_limit: bool = _rule(False, SWITCH)
    #: Whether a loaded process waits for the next job, which then starts some seconds sooner; None: if there is memory.
    waiting_worker: bool | None = _rule(None, SWITCH)


@dataclass(frozen=True, kw_only=True)
class PolicyFile:
    """Checked content of policy.toml."""

    path: Path
    data: DataSource
    #: "package.module:function" of the owner's own network; None: the plan's.
    encoder: str | None = None
    limits: tuple[Limit, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    runs: RunRules = field(default_factory=RunRules)
    metrics_port: int | None = None
    #: Remarks about valid settings that deserve the owner's attention.
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, site_folder: SiteFolder) -> PolicyFile:
        """Read an organisation's own policy.

        Raises:
            PolicyFileError: If it cannot be used. The message is private, for the owner alone.
        """
        path = site_folder.policy
        notes = _check_rights(path)
        try:
            with open(path, "rb") as file:
                raw = file.read(LARGEST + 1)
            content = raw.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyFileError(
                f"{path} cannot be read: {error}; write one with `pbmvfl policy template --home {site_folder.path}`"
            ) from error
        if len(raw) > LARGEST:
            raise PolicyFileError(f"{path} is longer than {LARGEST:,} bytes; it has a few lines")
        return replace(cls.parse(content, path=path, is_server=site_folder.is_server), notes=notes)

    @classmethod
    def parse(cls, content: str, *, path: Path, is_server: bool = False) -> PolicyFile:
        """Parse a policy; names of files in it are relative to the folder of `path`."""
        try:
            values = tomllib.loads(content)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PolicyFileError(f"{path} is no TOML: {error}") from error
        return _Reader(path).policy(values, path, is_server=is_server)

    @property
    def dataset(self) -> str:
        """Name that the ledger counts under."""
        return self.data.dataset

    def policy(self) -> Policy:
        """Return the rules for plans. Exact sums are refused whatever the file permits: they are for simulations."""
        return Policy(allows_exact_metrics=False, **self.plan)

    def apply_limits(self, ledger: Ledger) -> list[Limit]:
        """Write the file's limits into the owner's ledger, and return those that were set or lowered.

        Limits of the ledger that the file does not have stay. Only the owner's own command to the ledger raises a
        limit, so that a slip in a file cannot spend what was promised.

        Raises:
            PolicyFileError: If a limit of the file is looser than the ledger's.
        """
        changed = []
        for limit in self.limits:
            held = next((each for each in ledger.limits(self.data.dataset) if same_subject(each, limit)), None)
            if held is not None and (limit.epsilon > held.epsilon or limit.delta > held.delta):
                raise PolicyFileError(
                    f"{self.path}: [[limit]] {limit} is looser than the ledger's, epsilon {held.epsilon:g} at delta "
                    f"{held.delta:g}; lower it, or raise the ledger's first: {_raise_command(ledger, self, limit)}"
                )
            if held is None or (limit.epsilon, limit.delta) != (held.epsilon, held.delta):
                changed.append(ledger.set_limit(self.data.dataset, limit))
        return changed


@contextlib.contextmanager
def own_ledger(site_folder: SiteFolder, policy: PolicyFile) -> Iterator[Ledger]:
    """Open an organisation's ledger with the limits of its policy applied."""
    with contextlib.closing(Ledger(site_folder.ledger, owner=site_folder.name, durable=True)) as ledger:
        policy.apply_limits(ledger)
        yield ledger


def same_subject(one: Limit, other: Limit) -> bool:
    """Return whether both limits bound the same epsilon; a ledger has one of them."""
    return (one.unit, one.accounting, one.colluding_parties) == (other.unit, other.accounting, other.colluding_parties)


def _raise_command(ledger: Ledger, policy: PolicyFile, limit: Limit) -> str:
    colluding = f" --colluding-parties {limit.colluding_parties}" if limit.colluding_parties else ""
    return (
        f"`pbmvfl ledger limit {ledger.path} --dataset {policy.data.dataset!r} --epsilon {limit.epsilon:g} "
        f"--delta {limit.delta:g} --unit {limit.unit} --accounting {limit.accounting}{colluding}`"
    )


def _check_rights(path: Path) -> tuple[str, ...]:
    """Refuse a file that others may write: its writer decides what the rows spend."""
    try:
        found = os.stat(path)
    except OSError:
        return ()  # reading the file reports why
    mode = found.st_mode & 0o777
    if mode & 0o022:
        raise PolicyFileError(
            f"{path} may be written by others (mode {mode:o}): they could change what is accepted; chmod 600 it"
        )
    return (f"{path} may be read by everybody (mode {mode:o}); it is private: chmod 600 it",) if mode & 0o004 else ()


#: Settings of each table. The label holder's file has fewer.
_ROWS, _NAMES = {"file": TEXT, "id": TEXT}, {"schema": TEXT, "dataset": text(_DATASET), "version": text(_DATASET)}
_DATA = {**_ROWS, "columns": NAMES, **_NAMES, "made_up": SWITCH}
_LABELS = {**_ROWS, "label": TEXT, **_NAMES}
_ENCODER = {"own": text(_FUNCTION)}
_LIMIT = ("epsilon", "delta", "unit", "accounting", "counting", "colluding_parties")
_PLAN = {
    "smallest_num_parties": whole(2, 1000),
    "mechanisms": NAMES,
    "needs_secure_aggregation": SWITCH,
    "largest_epsilon": NUMBER,
    "unit": ANY,
    "delta": NUMBER,
    "smallest_noise": NUMBER,
    "fields": ANY,
}
_LABEL_PLAN = {"largest_label_epsilon": ANY, "labels_in_clear": SWITCH}
_RUNS: dict[str, Kind] = {each.name: each.metadata["kind"] for each in fields(RunRules)}
_WATCH = {"metrics_port": whole(1, 65535)}
_LABEL_HOLDERS = ("data", "limit", "plan", "runs", "watch")
_SECTIONS = ("data", "encoder", "limit", "plan", "runs", "watch")


class _Reader(TomlTables):
    """Reader of policy.toml."""

    error, suggests = PolicyFileError, True

    def wrong(self, setting: str, value: object, kind: Kind) -> str:
        said = f"={value!r}" if not kind.is_text else " is missing" if value is None else f" ={value!r}"
        return f"{setting}{said}; permitted: {kind.permitted}"

    def policy(self, values: dict[str, Any], path: Path, *, is_server: bool) -> PolicyFile:
        self.check_names("", values, _LABEL_HOLDERS if is_server else _SECTIONS)
        data = self._data(values, path.parent, is_server=is_server)
        return PolicyFile(
            path=path,
            data=data,
            encoder=self.read(values, "encoder", _ENCODER).get("own"),
            limits=self._limits(values.get("limit"), needed=not is_server and not data.made_up, is_server=is_server),
            plan=self._label_plan(values) if is_server else self._plan(values),
            runs=RunRules(**self.read(values, "runs", _RUNS)),
            metrics_port=self.read(values, "watch", _WATCH).get("metrics_port"),
        )

    def _data(self, values: dict[str, Any], folder: Path, *, is_server: bool) -> DataSource:
        found: dict[str, Any] = {"dataset": _USUAL_LABELS} if is_server else {}
        needed = ("file", "id", "label" if is_server else "dataset")
        found |= self.read(values, "data", _LABELS if is_server else _DATA, needed=needed)
        if found["id"] == found.get("label"):
            raise self.fault(f"[data] id and label are both {found['label']!r}; they are two columns")
        columns = found.get("columns", ())
        self._check_distinct("[data] columns", columns)
        if found["id"] in columns:
            raise self.fault(f"[data] columns has the id {found['id']!r}; leave it out: an id is nothing to learn from")
        for name in {"file", "schema"} & found.keys():
            found[name] = folder / Path(found[name]).expanduser()
        if found["file"].suffix not in (".csv", ".parquet"):
            raise self.fault(f"[data] file={found['file'].name!r}; permitted: a .csv or .parquet file")
        return DataSource(**found)

    def _check_distinct(self, setting: str, names: Sequence[str]) -> None:
        if len(set(names)) < len(names):
            raise self.fault(f"{setting} names one of them twice")

    def _limits(self, tables: Any, *, needed: bool, is_server: bool) -> tuple[Limit, ...]:
        if tables is None and not needed:
            return ()
        if not tables or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self.fault(_NO_LIMIT)
        found: list[Limit] = []
        for table in tables:
            self.check_names("limit", table, _LIMIT)
            for name in ("epsilon", "delta"):
                self.check("[limit]", name, table.get(name), replace(NUMBER, permitted="a number above 0"))
            self.check("limit", "colluding_parties", table.get("colluding_parties", 0), whole(0, 1000))
            usual: Unit = Unit.LABEL if is_server else Unit.CELL
            try:
                limit = Limit.choose(**{"unit": usual, "accounting": "strict", **table})
            except (PbmvflError, TypeError) as error:
                raise self.fault(f"[[limit]] {error}") from error
            if (limit.unit is Unit.LABEL) != is_server:
                permitted = (Unit.LABEL,) if is_server else COLUMN_UNITS
                raise self.fault(f"[[limit]] unit={limit.unit}; permitted here: {', '.join(permitted)}")
            if any(same_subject(limit, each) for each in found):
                raise self.fault(f"two [[limit]] are about {limit.unit}, {limit.accounting}; keep the smaller one")
            found.append(limit)
        return tuple(found)

    def _plan(self, values: dict[str, Any]) -> dict[str, Any]:
        rules = self.read(values, "plan", _PLAN)
        if "mechanisms" in rules:
            self._check_distinct("[plan] mechanisms", rules["mechanisms"])
            self.check_names("plan.mechanisms", dict.fromkeys(rules["mechanisms"]), list(MECHANISMS))
            rules["mechanisms"] = frozenset(rules["mechanisms"])
        if not isinstance(rules.get("fields", {}), dict):
            raise self.fault('[plan.fields] is a table: training = ["local"], num_epochs = {most = 200}')
        return self._checked(rules, "[plan]")

    def _label_plan(self, values: dict[str, Any]) -> dict[str, Any]:
        found = self.read(values, "plan", _LABEL_PLAN)
        rules = {
            "largest_label_epsilon": found.get("largest_label_epsilon", USUAL_LABEL_EPSILON),
            "allows_clear_labels": found.get("labels_in_clear", False),
        }
        return self._checked(rules, "[plan] largest_label_epsilon:")

    def _checked(self, rules: dict[str, Any], setting: str) -> dict[str, Any]:
        """Return rules for plans that a `Policy` takes."""
        try:
            Policy(**rules)
        except PbmvflError as error:
            raise self.fault(f"{setting} {error}") from error
        return rules

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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import PbmvflError, PolicyFileError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON
from pbmvfl.plan.policy import Policy
from pbmvfl.privacy.units import COLUMN_UNITS, Unit

#: In bytes; one that is filled in has about 2,000.
LARGEST = 1 << 20
_SECTIONS = ("data", "encoder", "limit", "plan", "runs", "watch")
_LABEL_HOLDERS = ("data", "limit", "plan", "runs", "watch")
_DATA = ("file", "id", "columns", "schema", "dataset", "version", "made_up")
_LABELS = ("file", "id", "label", "schema", "dataset", "version")
_LIMIT = ("epsilon", "delta", "unit", "accounting", "counting", "colluding_parties")
_PLAN = (
    "smallest_num_parties",
    "mechanisms",
    "needs_secure_aggregation",
    "largest_epsilon",
    "unit",
    "delta",
    "smallest_noise",
    "fields",
)
_LABEL_PLAN = ("largest_label_epsilon", "labels_in_clear")
#: Name that the label holder's ledger counts under, if its policy has none.
_USUAL_LABELS = "labels"
_RUNS = ("sessions", "hours", "alignments", "largest_alignment", "smallest_alignment", "until_limit", "waiting_worker")
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")
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

    def permit(self, now: datetime) -> bool:
        """Return whether a moment is within the hours."""
        clock = now.time()
        if self.begin <= self.end:
            return self.begin <= clock < self.end
        return clock >= self.begin or clock < self.end

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"


@dataclass(frozen=True, kw_only=True)
class RunRules:
    """Limits on how often, when and how much may be requested, whatever the plan."""

    #: The most sessions of one run: each that is begun again may release rounds a second time.
    sessions: int = 100
    hours: Hours | None = None
    #: The most alignments that are ever made: each tells the label holder which of its ids are here.
    alignments: int = 20
    #: The most ids that the label holder may ask about in one of them.
    largest_alignment: int = 10_000_000
    #: The fewest rows in common: fewer would single out people.
    smallest_alignment: int = 1
    #: Whether a run is begun although a limit will end it.
    until_limit: bool = False
    #: Whether a loaded process waits for the next job, which then starts some seconds sooner; None: if there is memory.
    waiting_worker: bool | None = None


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
            text = raw.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyFileError(
                f"{path} cannot be read: {error}; write one with `pbmvfl policy template --home {site_folder.path}`"
            ) from error
        if len(raw) > LARGEST:
            raise PolicyFileError(f"{path} is longer than {LARGEST:,} bytes; it has a few lines")
        return cls.parse(text, path=path, is_server=site_folder.is_server, notes=notes)

    @classmethod
    def parse(cls, text: str, *, path: Path, is_server: bool = False, notes: tuple[str, ...] = ()) -> PolicyFile:
        """Parse a policy; names of files in it are relative to the folder of `path`."""
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PolicyFileError(f"{path} is no TOML: {error}") from error
        return _Reader(path, is_server=is_server, notes=notes).read(values)

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


class _Reader:
    """Reader of the file's tables that names what is wrong with them."""

    def __init__(self, path: Path, *, is_server: bool, notes: tuple[str, ...]) -> None:
        self._path, self._is_server, self._notes = path, is_server, notes

    def read(self, values: dict[str, Any]) -> PolicyFile:
        sections = _LABEL_HOLDERS if self._is_server else _SECTIONS
        self._check_names("", values, sections)
        data = self._data(self._table(values, "data", _LABELS if self._is_server else _DATA, needed=True))
        return PolicyFile(
            path=self._path,
            data=data,
            encoder=self._encoder(self._table(values, "encoder", ("own",))),
            limits=self._limits(values.get("limit"), needed=not self._is_server and not data.made_up),
            plan=self._label_plan(self._table(values, "plan", _LABEL_PLAN))
            if self._is_server
            else self._plan(self._table(values, "plan", _PLAN)),
            runs=self._runs(self._table(values, "runs", _RUNS)),
            metrics_port=self._port(self._table(values, "watch", ("metrics_port",))),
            notes=self._notes,
        )

    def _fault(self, words: str) -> PolicyFileError:
        return PolicyFileError(f"{self._path}: {words}")

    def _check_names(self, where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
        for name in table:
            if name not in known:
                near = get_close_matches(name, list(known), n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                called = f"[{where}] {name}" if where else f"[{name}]"
                raise self._fault(f"{called} is not known; {hint}permitted: {', '.join(known)}")

    def _table(
        self, values: Mapping[str, Any], name: str, known: Collection[str], *, needed: bool = False
    ) -> dict[str, Any]:
        table = values.get(name, None if needed else {})
        if not isinstance(table, dict):
            raise self._fault(f"it needs a table [{name}] with {', '.join(known)}")
        self._check_names(name, table, known)
        return table

    # --- kinds of values ---

    def _text(self, where: str, table: Mapping[str, Any], name: str, *, form: re.Pattern[str] | None = None) -> str:
        value = table.get(name)
        if not isinstance(value, str) or not value or (form is not None and not form.fullmatch(value)):
            said = "is missing" if value is None else f"={value!r}"
            needs = "a text that is not empty" if form is None else f"a text of the form {form.pattern}"
            raise self._fault(f"[{where}] {name} {said}; permitted: {needs}")
        return value

    def _whole(self, where: str, table: Mapping[str, Any], name: str, usual: int, *, least: int, most: int) -> int:
        value = table.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._fault(f"[{where}] {name}={value!r}; permitted: a whole number in {least}..{most}")
        return value

    def _switch(self, where: str, table: Mapping[str, Any], name: str) -> bool:
        value = table.get(name, False)
        if not isinstance(value, bool):
            raise self._fault(f"[{where}] {name}={value!r}; permitted: true or false")
        return value

    def _names(self, where: str, table: Mapping[str, Any], name: str) -> tuple[str, ...]:
        value = table[name]
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise self._fault(f'[{where}] {name}={value!r}; permitted: a list of names, such as ["age", "job"]')
        if len(set(value)) < len(value):
            raise self._fault(f"[{where}] {name} names one of them twice")
        return tuple(value)

    def _file(self, table: Mapping[str, Any], name: str) -> Path:
        return self._path.parent / Path(self._text("data", table, name)).expanduser()

    # --- sections ---

    def _data(self, table: Mapping[str, Any]) -> DataSource:
        file, ids = self._file(table, "file"), self._text("data", table, "id")
        if file.suffix not in (".csv", ".parquet"):
            raise self._fault(f"[data] file={file.name!r}; permitted: a .csv or .parquet file")
        schema = self._file(table, "schema") if "schema" in table else None
        version = self._text("data", table, "version", form=_DATASET) if "version" in table else ""
        if self._is_server:
            label = self._text("data", table, "label")
            if label == ids:
                raise self._fault(f"[data] id and label are both {label!r}; they are two columns")
            dataset = self._text("data", {"dataset": _USUAL_LABELS, **table}, "dataset", form=_DATASET)
            return DataSource(file=file, id=ids, schema=schema, label=label, dataset=dataset, version=version)
        columns = self._names("data", table, "columns") if "columns" in table else None
        if columns is not None and ids in columns:
            raise self._fault(f"[data] columns has the id {ids!r}; leave it out: an id is nothing to learn from")
        return DataSource(
            file=file,
            id=ids,
            columns=columns,
            schema=schema,
            dataset=self._text("data", table, "dataset", form=_DATASET),
            version=version,
            made_up=self._switch("data", table, "made_up"),
        )

    def _encoder(self, table: Mapping[str, Any]) -> str | None:
        return self._text("encoder", table, "own", form=_FUNCTION) if table else None

    def _limits(self, tables: Any, *, needed: bool) -> tuple[Limit, ...]:
        if tables is None and not needed:
            return ()
        usual: Unit = Unit.LABEL if self._is_server else Unit.CELL
        if not tables or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._fault(_NO_LIMIT)
        found: list[Limit] = []
        for table in tables:
            self._check_names("limit", table, _LIMIT)
            for name in ("epsilon", "delta"):
                if isinstance(table.get(name), bool) or not isinstance(table.get(name), int | float):
                    raise self._fault(f"[[limit]] {name}={table.get(name)!r}; permitted: a number above 0")
            self._whole("limit", table, "colluding_parties", 0, least=0, most=1000)
            try:
                limit = Limit.choose(**{"unit": usual, "accounting": "strict", **table})
            except (PbmvflError, TypeError) as error:
                raise self._fault(f"[[limit]] {error}") from error
            if (limit.unit is Unit.LABEL) != self._is_server:
                permitted = (Unit.LABEL,) if self._is_server else COLUMN_UNITS
                raise self._fault(f"[[limit]] unit={limit.unit}; permitted here: {', '.join(permitted)}")
            if any(same_subject(limit, each) for each in found):
                raise self._fault(f"two [[limit]] are about {limit.unit}, {limit.accounting}; keep the smaller one")
            found.append(limit)
        return tuple(found)

    def _plan(self, table: dict[str, Any]) -> dict[str, Any]:
        rules = dict(table)
        self._whole("plan", table, "smallest_num_parties", 2, least=2, most=1000)
        rules["needs_secure_aggregation"] = self._switch("plan", table, "needs_secure_aggregation")
        if "mechanisms" in table:
            rules["mechanisms"] = frozenset(self._names("plan", table, "mechanisms"))
            self._check_names("plan.mechanisms", dict.fromkeys(rules["mechanisms"]), list(MECHANISMS))
        if not isinstance(table.get("fields", {}), dict):
            raise self._fault('[plan.fields] is a table: training = ["local"], num_epochs = {most = 200}')
        for name in ("largest_epsilon", "delta", "smallest_noise"):
            if name in table and (isinstance(table[name], bool) or not isinstance(table[name], int | float)):
                raise self._fault(f"[plan] {name}={table[name]!r}; permitted: a number")
        try:
            Policy(**rules)
        except PbmvflError as error:
            raise self._fault(f"[plan] {error}") from error
        return rules

    def _label_plan(self, table: dict[str, Any]) -> dict[str, Any]:
        largest = table.get("largest_label_epsilon", USUAL_LABEL_EPSILON)
        rules = {
            "largest_label_epsilon": largest,
            "allows_clear_labels": self._switch("plan", table, "labels_in_clear"),
        }
        try:
            Policy(**rules)
        except PbmvflError as error:
            raise self._fault(f"[plan] largest_label_epsilon: {error}") from error
        return rules

    def _runs(self, table: Mapping[str, Any]) -> RunRules:
        usual = RunRules()
        return RunRules(
            sessions=self._whole("runs", table, "sessions", usual.sessions, least=1, most=100_000),
            hours=self._hours(table),
            alignments=self._whole("runs", table, "alignments", usual.alignments, least=0, most=100_000),
            largest_alignment=self._whole(
                "runs", table, "largest_alignment", usual.largest_alignment, least=1, most=10**9
            ),
            smallest_alignment=self._whole(
                "runs", table, "smallest_alignment", usual.smallest_alignment, least=1, most=10**9
            ),
            until_limit=self._switch("runs", table, "until_limit"),
            waiting_worker=self._switch("runs", table, "waiting_worker") if "waiting_worker" in table else None,
        )

    def _hours(self, table: Mapping[str, Any]) -> Hours | None:
        if "hours" not in table:
            return None
        value = table["hours"]
        found = _HOURS.fullmatch(value) if isinstance(value, str) else None
        if found is None or value[:5] == value[6:]:
            raise self._fault(f'[runs] hours={value!r}; permitted: two times of the clock, such as "07:00-19:00"')
        begin_hour, begin_minute, end_hour, end_minute = map(int, found.groups())
        return Hours(time(begin_hour, begin_minute), time(end_hour, end_minute))

    def _port(self, table: Mapping[str, Any]) -> int | None:
        return self._whole("watch", table, "metrics_port", 0, least=1, most=65535) if table else None

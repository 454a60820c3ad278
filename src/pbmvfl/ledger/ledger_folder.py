"""Folder of a simulation's ledgers, one for each party and one for the label holder, each named by its owner."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.ledger.database import ENDING, file_name
from pbmvfl.ledger.forecast import Forecast, why_charged
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.session_opening import Opening
from pbmvfl.ledger.store import EmptyLedger
from pbmvfl.privacy.table import format_epsilon

#: Owner of the label holder's ledger in a simulation, which has its file's name.
LABEL_HOLDER = "label-holder"


class OpenLedgers:
    """Ledgers of one run, each opened at most once, when it is first looked at."""

    def __init__(self, *, to_charge: bool = False) -> None:
        """Open nothing yet.

        Args:
            to_charge: Open them so that they can be charged after `Ledger.prepare`; without it they are read only. In
                either case nothing is written by looking.
        """
        self._to_charge = to_charge
        self._found: dict[Path, Ledger] = {}

    def begun(self, path: Path) -> Ledger | None:
        """Return a ledger; None where there is none, or a full disk left an empty file."""
        if path not in self._found:
            if not path.is_file():
                return None
            try:
                self._found[path] = Ledger(path, read_only=not self._to_charge, prepare=not self._to_charge)
            except EmptyLedger:
                return None
        return self._found[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for ledger in self._found.values():
            ledger.close()
        self._found = {}


def _or_new(opened: OpenLedgers | None) -> contextlib.AbstractContextManager[OpenLedgers]:
    """Return the ledgers that are open already, or readers that are closed with the context."""
    return OpenLedgers() if opened is None else contextlib.nullcontext(opened)


def ledger_file_of(
    folder: Path, index: int, party: str, *, dataset: str | None = None, opened: OpenLedgers | None = None
) -> Path:
    """Return the file of a party's ledger; a new one is named by the party.

    Folders of earlier versions have ledgers by the party's number, without an owner: such a one is used further. If
    there are both, and the older one knows the dataset, neither alone would have everything.
    """
    named, numbered = folder / file_name(party), folder / f"party-{index}{ENDING}"
    if named == numbered:
        return named
    with _or_new(opened) as ledgers:
        older = ledgers.begun(numbered)
        if older is None or older.owner:
            return named  # of a party with that very name
        if not named.is_file():
            return numbered
        if dataset is not None and older.sessions(dataset):
            raise LedgerError(
                f"ledger={str(folder)!r} has two ledgers of party={party!r} that know dataset={dataset!r}: "
                f"{named.name} and {numbered.name}, which an earlier version named by number; move the one that is not "
                "to be used to another folder"
            )
    return named


class Rows(Protocol):
    """Rows of a run, of whatever kind, as ledgers know them."""

    @property
    def name(self) -> str: ...
    @property
    def party_names(self) -> tuple[str, ...]: ...
    @property
    def rows_are_named(self) -> bool: ...


def ledger_files_for(folder: Path, rows: Rows, opened: OpenLedgers | None = None) -> list[Path]:
    """Return the ledger file of each party that releases anything about these rows, in the parties' order.

    Raises:
        LedgerError: As `ledger_files_of`; or a party's ledger has a limit and the rows have no ids, so that the same
            people in another table would begin with nothing spent.
    """
    found = ledger_files_of(folder, rows.party_names, dataset=rows.name, opened=opened)
    _check_rows_named(rows, found, opened)
    return found


def label_ledger_for(folder: Path, rows: Rows) -> Path:
    """Return the file of the label holder's ledger.

    Raises:
        LedgerError: The ledger has a limit and the rows have no ids.
    """
    path = folder / file_name(LABEL_HOLDER)
    _check_rows_named(rows, [path])
    return path


def _check_rows_named(rows: Rows, paths: Sequence[Path], opened: OpenLedgers | None = None) -> None:
    if not rows.rows_are_named and (with_limit := limited(paths, opened)):
        raise LedgerError(
            f"ledger={str(with_limit[0])!r} has a limit, and rows of dataset={rows.name!r} have no ids: it would know "
            "them by their places, and in another table the same people would begin with nothing spent. Nothing "
            "was sent or written. Name the column that tells people apart, the same one for every table (--id COLUMN, "
            "id=...), or give rows in memory with their ids (NewRows)"
        )


def ledger_files_of(
    folder: Path, parties: Sequence[str], *, dataset: str, opened: OpenLedgers | None = None
) -> list[Path]:
    """Return the ledger file of each party of a run, in their order.

    Raises:
        LedgerError: A ledger in the folder has a limit, and a party has no ledger there. A party under another name, or
            one that holds another party's columns, would begin with no limit and nothing spent: its owner adds it. Or a
            party has the label holder's name.
    """
    if LABEL_HOLDER in parties:
        raise LedgerError(f"party={LABEL_HOLDER!r} has the name of the label holder's ledger; name the party otherwise")
    with _or_new(opened) as ledgers:
        found = [
            ledger_file_of(folder, index, party, dataset=dataset, opened=ledgers) for index, party in enumerate(parties)
        ]
        unknown = [(party, path) for party, path in zip(parties, found, strict=True) if ledgers.begun(path) is None]
    if unknown and (with_limit := limited(party_ledgers(folder))):
        names = ", ".join(f"party={party!r}" for party, _ in unknown)
        commands = " && ".join(_adding(path, dataset) for _, path in unknown)
        raise LedgerError(
            f"ledger={str(folder)!r} has no ledger of {names}, and {with_limit[0].name} there has a limit: columns "
            "under another party's name would begin with no limit and nothing spent. Nothing was sent or written. Give "
            f"the party the name that it had, or, if it is new, let its owner add it with a limit E: `{commands}`"
        )
    return found


def party_ledgers(folder: Path) -> list[Path]:
    """Return all ledgers of a folder but the label holder's."""
    return [path for path in sorted(folder.glob(f"*{ENDING}")) if path.name != file_name(LABEL_HOLDER)]


def limited(paths: Sequence[Path], opened: OpenLedgers | None = None) -> list[Path]:
    """Return the ledgers that have a limit.

    Raises:
        LedgerError: One cannot be read, or is an older copy, which may lack a limit.
    """
    found = []
    with _or_new(opened) as ledgers:
        for path in paths:
            if (ledger := ledgers.begun(path)) is not None:
                ledger.check_unspoiled()
                if ledger.has_limits:
                    found.append(path)
    return found


def _adding(path: Path, dataset: str) -> str:
    """Return the shell command by which an owner makes a ledger with its limit."""
    named = ("pbmvfl", "ledger", "limit", str(path), "--dataset", dataset)
    return shlex.join((*named, "--unit", "cell", "--accounting", "strict", "--epsilon", "E"))


@dataclass(frozen=True, kw_only=True)
class PartyForecast:
    """Forecast of one party's ledger for a run."""

    party: str
    path: Path
    #: Runs of this dataset in the ledger that have charged a round.
    runs: int
    #: One for each limit of the dataset.
    limits: tuple[Forecast, ...]
    #: What can be done if a limit would end the run; "" for what is usual.
    way_out: str = ""
    #: How many predicted rows have no stored answer and will be charged; None where all rounds will be.
    charged_rows: int | None = None

    @property
    def ends(self) -> Forecast | None:
        """The limit that would end the run first; None if none would."""
        early = [limit for limit in self.limits if limit.stops_at is not None]
        return min(early, key=lambda limit: limit.stops_at or 0, default=None)


def look_ahead(
    path: Path, *, party: str, opening: Opening, opened: OpenLedgers | None = None, way_out: str = ""
) -> PartyForecast:
    """Return what a party's ledger says to a session (`Ledger.forecast`); a ledger that is not there says nothing.

    Args:
        path: The ledger's file.
        party: Its owner.
        opening: The session.
        opened: Ledgers that are open already.
        way_out: What can be done if a limit would end the run.

    Raises:
        LedgerError: The ledger would refuse the session, or is another party's.
    """
    with _or_new(opened) as ledgers:
        charged_rows = None if opening.unanswered is None else len(opening.unanswered)
        if (ledger := ledgers.begun(path)) is None:
            return PartyForecast(party=party, path=path, runs=0, limits=(), way_out=way_out, charged_rows=charged_rows)
        ledger.check_owner(party)
        limits = ledger.forecast(opening)
        past = ledger.sessions(opening.dataset)
    runs = {entry.run for entry in past if entry.charged_until > entry.first_round}
    return PartyForecast(
        party=party, path=path, runs=len(runs), limits=limits, way_out=way_out, charged_rows=charged_rows
    )


def check_reaches_end(found: Sequence[PartyForecast], *, dataset: str, rounds: int, way_out: str | None = None) -> None:
    """Refuse a run that some owner's limit would end before its plan does; `way_out` says what else could be done."""
    ends = [(each, limit) for each in found if (limit := each.ends) is not None]
    if not ends:
        return
    first, limit = min(ends, key=lambda end: end[1].stops_at or 0)
    others = "" if len(ends) == 1 else " and of 1 other" if len(ends) == 2 else f" and of {len(ends) - 1} others"
    usual = (
        f"Plan within what is left (`pbmvfl plan` with the data's own options and --ledger {first.path.parent}), or "
        "run until the limit: --until-limit, Federation.fit(until_limit=True)"
    )
    raise BudgetExceeded(
        f"the limit of party={first.party!r}{others} would end this run at round={limit.stops_at} of {rounds}: it "
        f"would bring dataset {limit.dataset!r} from epsilon {format_epsilon(limit.spent)} to "
        f"{format_epsilon(limit.will_be)}, and the owner's limit is {limit.limit}, counted {limit.limit.how}. Nothing "
        "was sent or written. "
        + (first.way_out or way_out or usual if limit.dataset == dataset else why_charged(limit.dataset))
    )


def check_folder(folder: Path) -> None:
    """Refuse what cannot be a folder of ledgers, and make nothing yet."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise LedgerError(
            f"ledger={str(folder)!r} is not a folder and cannot be made one: {str(there)!r} is a file; give another "
            "folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise LedgerError(f"ledger={str(folder)!r} cannot be written to; give another folder, or allow writing there")


def make_folder(folder: Path) -> None:
    """Make the folder of the parties' ledgers, or refuse what cannot be one, before anything is released."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"ledger={str(folder)!r} is not a folder and cannot be made one ({error.strerror}); give another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LedgerError(f"ledger={str(folder)!r} cannot be written to; give another folder, or allow writing there")

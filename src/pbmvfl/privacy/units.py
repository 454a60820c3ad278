"""Units, adversaries and accountings: whose values an epsilon protects, from whom, and how releases were counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pbmvfl.errors import PlanError


class Unit(StrEnum):
    """Unit of protection: what may be replaced between two neighbouring data sets.

    For the first three labels are the same in both data sets; for a label all columns are.
    """

    CELL = "cell"
    """One party's values of one row."""
    RECORD = "record"
    """One row, at every party that is not on the adversary's side."""
    PARTY = "party"
    """All of one party's values, in every row."""
    LABEL = "label"
    """The label of one training row, which the label holder holds; all parties together are the adversary."""


#: Units of what parties hold: those that a budget of columns can protect.
COLUMN_UNITS = (Unit.CELL, Unit.RECORD, Unit.PARTY)


def column_unit(value: str) -> Unit:
    """Return the unit of columns that a text names.

    Raises:
        PlanError: There is none of that name.
    """
    for unit in COLUMN_UNITS:
        if value == unit:
            return unit
    hint = "; labels have an epsilon of their own: label_epsilon" if value == Unit.LABEL else ""
    raise PlanError(f"unit={str(value)!r} is not one of {', '.join(COLUMN_UNITS)}: say which epsilon is meant{hint}")


class Accounting(StrEnum):
    """Rule that says which releases are charged to a unit."""

    PAPER = "paper"
    """Only the releases of the unit's own rows. Not a proof: weights trained on them carry them into other rows."""
    STRICT = "strict"
    """Every release that can depend on the unit: a theorem under the conditions printed with the number."""


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Reader of what leaves the parties.

    A party knows what it added, so the noise of M - colluding_parties parties counts, whether or not the server is on
    the
    same side.
    """

    server: bool = True
    colluding_parties: int = 0

    def __post_init__(self) -> None:
        if self.colluding_parties < 0:
            raise PlanError(f"colluding_parties={self.colluding_parties}; permitted: 0 or more.")
        if not self.server and self.colluding_parties == 0:
            raise PlanError(
                "server=False with colluding_parties=0 is nobody; permitted: server=True, or colluding_parties of 1 "
                "or more (one curious party is colluding_parties=1)."
            )

    @property
    def role(self) -> str:
        """The word used in tables: "server" (alone or with parties) or "party" (without the server)."""
        return "server" if self.server else "party"

    def honest_parties(self, num_parties: int) -> int:
        """Parties whose noise counts: M - t, at least one."""
        if num_parties < 1:
            raise PlanError(f"num_parties={num_parties}; permitted: 1 or more.")
        if self.colluding_parties > num_parties - 1:
            raise PlanError(
                f"colluding_parties={self.colluding_parties} with num_parties={num_parties}; permitted: 0 to "
                f"{num_parties - 1}: at least one party must be left to protect."
            )
        return num_parties - self.colluding_parties

    def __str__(self) -> str:
        t = self.colluding_parties
        parties = f"{t} {'party' if t == 1 else 'parties'}"
        if not self.server:
            return parties
        return "server" if t == 0 else f"server + {parties}"


SERVER = Adversary()
CURIOUS_PARTY = Adversary(server=False, colluding_parties=1)

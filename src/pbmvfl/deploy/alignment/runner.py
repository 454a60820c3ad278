"""Alignment at one site: from the organisation's own file to its rows in the common order, in its own folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.deploy.alignment.aligned_rows import AlignedLabels, load_labels, materialise, materialise_labels
from pbmvfl.deploy.alignment.coordinator import LabelSideAlignment
from pbmvfl.deploy.alignment.party import PartySideAlignment
from pbmvfl.deploy.alignment.row_ids import AgreedOrder
from pbmvfl.deploy.alignment.tables import read_label_table, read_party_table
from pbmvfl.deploy.link.interface import ServerLink
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.errors import AlignmentError, FederationError

_REQUEST, _FACTS = "request.json", "facts.json"


# --- a party ---


def party_alignment(site_folder: SiteFolder, name: str, policy: PolicyFile) -> PartySideAlignment:
    """Return a party's role in an alignment, within its policy."""
    data = policy.data
    table = read_party_table(data.file, id=data.id, columns=data.columns, schema=data.schema, party=site_folder.name)

    def keep(order: AgreedOrder) -> None:
        _put_aside(site_folder.alignment(name))
        materialise(table, order, site_folder.alignment(name))

    return PartySideAlignment(
        party=site_folder.name,
        name=name,
        ids=table.ids,
        kinds=table.columns.kinds,
        keep=keep,
        most_ids=policy.runs.largest_alignment,
        least_rows=policy.runs.smallest_alignment,
    )


def _put_aside(folder: Path) -> None:
    """Move the rows of an earlier alignment of that name away; they are kept until the next one."""
    if folder.exists():
        before = folder.with_name(f"{folder.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)


# --- the label holder ---


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rows of the label holder that an alignment is about."""

    file: Path
    id: str
    label: str | None

    @classmethod
    def of(cls, site_folder: SiteFolder, file: Path | None = None) -> Request:
        """Return the rows of policy.toml, or of another file with the same columns, with or without the label."""
        data = PolicyFile.read(site_folder).data
        if file is None:
            return cls(file=data.file, id=data.id, label=data.label or None)
        from pbmvfl.data.faults import Faults
        from pbmvfl.data.readers import column_names, source_of

        faults = Faults()
        present = column_names(source_of(file), faults) or []
        faults.raise_any()
        return cls(file=file.resolve(), id=data.id, label=data.label if data.label in present else None)

    def write(self, folder: Path) -> None:
        make_private_folder(folder)
        said = {"file": str(self.file), "id": self.id, "label": self.label}
        write_atomically(folder / _REQUEST, json.dumps(said) + "\n", mode=PRIVATE_FILE)

    @classmethod
    def read(cls, folder: Path) -> Request:
        said = read_object(folder / _REQUEST, {"file": str, "id": str, "label": str | None}, FederationError)
        return cls(file=Path(said["file"]), id=said["id"], label=said["label"])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LabelRows(AlignedLabels):
    """The label holder's rows in the common order, and the public facts of all parties' rows."""

    label: str | None
    #: Kinds of the values that a row becomes at each party (`plan.shapes`), in federation.toml's order.
    kinds: tuple[str, ...]

    @classmethod
    def load(cls, site_folder: SiteFolder, name: str) -> LabelRows:
        folder = site_folder.alignment(name)
        if not folder.is_dir():
            known = sorted(each.name for each in (site_folder.path / "alignments").glob("*") if "." not in each.name)
            raise AlignmentError(
                f"alignment={name!r} is not there; make it with `pbmvfl align {name}`. There are: "
                f"{', '.join(known) or 'none'}"
            )
        facts = read_object(folder / _FACTS, {"label": str | None}, FederationError)
        # Alignments of version 0.1 know how many columns there are, and not of which kind.
        kinds_of: dict[str, str] = facts.get("kinds") or {name: "c" * width for name, width in facts["widths"].items()}
        kinds = tuple(kinds_of[party] for party in site_folder.federation.parties)
        return cls(**vars(load_labels(folder)), label=facts["label"], kinds=kinds)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of values that a row becomes at each party."""
        return tuple(map(len, self.kinds))

    @property
    def num_rows(self) -> int:
        return self.count

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    @property
    def train_labels(self) -> npt.NDArray[np.int64]:
        """Class of each row, for training."""
        if self.labels is None:
            raise AlignmentError(
                f"alignment={self.name!r} has no labels, so nothing can be trained on it; align a file that has"
            )
        return np.array(self.labels)

    @property
    def test_labels(self) -> npt.NDArray[np.int64]:
        """Empty: rows that are only predicted have an alignment of their own."""
        return np.empty(0, dtype=np.int64)

    def labels_for(self, class_names: Sequence[str]) -> npt.NDArray[np.int64] | None:
        """Return the class of each row by a model's numbering; None without labels, or with unknown ones."""
        if self.labels is None or not set(self.class_names) <= set(class_names):
            return None
        number = np.array([class_names.index(name) for name in self.class_names], dtype=np.int64)
        return number[self.labels]


def align_labels(
    site_folder: SiteFolder, name: str, link: ServerLink, progress: Callable[[int, int], None]
) -> LabelRows:
    """Run the label holder's whole role in an alignment.

    Args:
        site_folder: The label holder's folder.
        name: Name of the alignment, which was requested before.
        link: The link to the parties.
        progress: Called with the steps done and their total.
    """
    request = Request.read(site_folder.request(name))
    table = read_label_table(request.file, id=request.id, label=request.label)
    found = LabelSideAlignment(link, table.ids, name=name, progress=progress).run()
    folder = site_folder.alignment(name)
    _put_aside(folder)
    materialise_labels(table, found, folder)
    kinds = {party: record.kinds for party, record in found.parties.items()}
    said: dict[str, Any] = {"kinds": kinds, "label": request.label}
    write_atomically(folder / _FACTS, json.dumps(said) + "\n", mode=PRIVATE_FILE)
    return LabelRows.load(site_folder, name)

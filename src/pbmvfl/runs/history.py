"""What is known of a run epoch by epoch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pbmvfl.errors import CheckpointError, PbmvflError
from pbmvfl.json_files import checked_object

_NUMBER = int | float


@dataclass(frozen=True, kw_only=True)
class EpochLine:
    """One epoch, or the part of one that a run came to. What was not measured is None."""

    epoch: float
    train_loss: float | None = None
    train_accuracy: float | None = None
    train_auprc: float | None = None
    test_accuracy: float | None = None
    test_auprc: float | None = None
    #: From the noisy sums of the epoch's own rounds, where the figures above come from exact ones.
    released_train_accuracy: float | None = None
    released_train_auprc: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The measured figures alone."""
        names = ("train_accuracy", "test_accuracy", "train_auprc", "test_auprc", "train_loss")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def released(self) -> dict[str, float]:
        """Those of them that the server had from noisy sums as well, under the same names."""
        names = ("train_accuracy", "train_auprc")
        return {name: value for name in names if (value := getattr(self, f"released_{name}")) is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what was not measured is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: object, path: Path, error: type[PbmvflError] = CheckpointError) -> EpochLine:
        """What `to_dict` wrote into `path`."""
        line = checked_object(values, {"epoch": _NUMBER}, path, error)
        checked_object(line, dict.fromkeys(line, _NUMBER), path, error)
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in line.items() if name in known})


def history_csv(history: Sequence[EpochLine]) -> str:
    """One line an epoch, with a column for everything that any epoch recorded."""
    lines: Iterable[Mapping[str, Any]] = [line.to_dict() for line in history]
    names = list(dict.fromkeys(name for row in lines for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()

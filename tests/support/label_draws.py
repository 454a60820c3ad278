"""What tests of drawn labels share: a label holder in a folder, and counts read from its files without its code."""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.federation.drawn_labels import LabelHolder
from pbmvfl.mechanisms.label_response import LabelResponse

NAME = "people"
CLASSES = ("no", "yes", "maybe")
STORE, LEDGER = "labels", "label-holder.sqlite"


def holder_in(folder: Path, **choices: Any) -> LabelHolder:
    usual: dict[str, Any] = {"dataset": NAME, "class_names": CLASSES}
    return LabelHolder(**{**usual, "store": folder / STORE, "ledger": folder / LEDGER, **choices})


def law(epsilon: float = 2.0, num_classes: int = len(CLASSES)) -> LabelResponse:
    return LabelResponse(num_classes=num_classes, epsilon=epsilon)


def true_labels(count: int = 30, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, len(CLASSES), count)


def made(folder: Path) -> int:
    """Draws in a store: entries of all whole blocks, less the one in each block that names the batch."""
    path = folder / STORE / "answers"
    data = path.read_bytes() if path.exists() else b""
    place, found = 16 + 32 + 16, 0
    while place + 24 <= len(data):
        rows, width = struct.unpack_from("<II", data, place)
        end = place + 24 + rows * (16 + 4 * width) + 16
        if end > len(data):
            break
        place, found = end, found + rows - 1
    return found


def charged(folder: Path, ledger: str = LEDGER) -> Counter[tuple[str, int, str]]:
    """How often each (row, weight of another label, data version) was charged, read by SQL."""
    found: Counter[tuple[str, int, str]] = Counter()
    if not (folder / ledger).exists():
        return found
    connection = sqlite3.connect(folder / ledger)
    lines = connection.execute(
        "SELECT train_ids, sessions.session, terms FROM sessions JOIN charged ON id = charged.session "
        "JOIN plans ON plans.hash = sessions.plan WHERE charged_until > first_round"
    ).fetchall()
    for reference, what, terms in lines:
        sort, _, rest = reference.partition(":")
        if sort == "range":
            names = [str(row) for row in range(*map(int, rest.split(":")))]
        else:
            (packed,) = connection.execute("SELECT ids FROM row_ids WHERE hash = ?", (rest,)).fetchone()
            names = json.loads(zlib.decompress(packed))
        (event,) = json.loads(terms)["events"]["labels"]
        found.update((name, event["other_weight"], json.loads(what)["version"]) for name in names)
    connection.close()
    return found

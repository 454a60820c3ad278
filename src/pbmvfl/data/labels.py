"""Labels, numbered as classes. Faults show them: the labels belong to the server, which reads the messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._text import counted
from pbmvfl.data.encoding import is_text
from pbmvfl.data.faults import Faults, Place, listed

Labels = npt.NDArray[np.int64]

#: ImageNet has as many. A label with more is nearly always an amount or an identifier.
_MOST_CLASSES = 1_000
#: Of so many rows or more, a class needs four on average; of fewer, two.
_MANY_ROWS = 100
NO_REGRESSION = (
    "amounts are not predicted here: cut the target into a few classes before (numpy.digitize, pandas.cut), or use a "
    "regressor of another library"
)
_GROUP_LABELS = f"If the label is an identifier, give another column as label; {NO_REGRESSION}"


def label_values(column: Any, label: str, place: Place, faults: Faults) -> list[Any] | None:
    """Return every row's label as a word, a whole number, or true or false; None with a fault."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    permitted = (is_text, pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating, pa.types.is_null)
    if not any(check(kind) for check in permitted):
        faults.add(f"{place.file}: label={label!r} has type {kind}; permitted are words, numbers and true or false")
        return None
    missing = np.flatnonzero(pc.is_null(column, nan_is_null=True).to_numpy())
    if len(missing):
        has = "has no label; every row needs one" if len(missing) == 1 else "have no label; every row needs one"
        faults.add(f"{place.file}: label={label!r}: {place.rows(missing)} {has}")
        return None
    values = list(column.to_pylist())
    if not pa.types.is_floating(kind):
        return values
    row = next((row for row, value in enumerate(values) if not value.is_integer()), None)
    if row is not None:
        faults.add(
            f"{place.file}: label={label!r}: {place.rows([row])} has {values[row]!r}, which is not a whole number; "
            f"there are {len(set(values)):,} different values, and each would be a class of its own. {_GROUP_LABELS}"
        )
        return None
    return [int(value) for value in values]  # as in a file that has them as integers


def number_classes(raw: Sequence[Sequence[Any]], label: str, faults: Faults) -> tuple[tuple[str, ...], list[Labels]]:
    """Return the class names in order, and the class numbers of the rows of each table."""
    counts = Counter(value for values in raw for value in values)
    try:
        classes = sorted(counts)
    except TypeError:
        faults.add(f"label={label!r} has another type in the test file than in the training file")
        return (), []
    rows = sum(len(values) for values in raw)
    share, each = ("a quarter of", 4) if rows >= _MANY_ROWS else ("half", 2)
    most = min(_MOST_CLASSES, max(2, rows // each))
    if len(classes) > most:
        faults.add(
            f"label={label!r} has {len(classes):,} classes in {rows:,} rows; permitted are at most {most:,} "
            f"({share} the rows, and never more than {_MOST_CLASSES:,}). {_GROUP_LABELS}"
        )
        return (), []
    _refuse_alike(counts, label, faults)
    if len(classes) < 2:
        faults.add(
            f"label={label!r} has the same value, {str(classes[0])!r}, in all {rows:,} rows; at least 2 classes are "
            "needed"
        )
    number = {value: index for index, value in enumerate(classes)}
    labels = [np.array([number[value] for value in values], dtype=np.int64) for values in raw]
    return tuple(str(value) for value in classes), labels


def known_labels(values: Sequence[Any], class_names: Sequence[str], label: str, place: Place, faults: Faults) -> Labels:
    """Return class numbers of new rows, whose classes must be known ones."""
    number = {name: index for index, name in enumerate(class_names)}
    unknown = [row for row, value in enumerate(values) if str(value) not in number]
    if unknown:
        words = sorted({str(values[row]) for row in unknown})
        faults.add(
            f"{place.file}: label={label!r}: {place.rows(unknown)} {'has' if len(unknown) == 1 else 'have'} "
            f"{'a class' if len(words) == 1 else 'classes'} that the model does not know ({listed(words)}); "
            f"known: {listed(class_names)}"
        )
        return np.zeros(len(values), dtype=np.int64)
    return np.array([number[str(value)] for value in values], dtype=np.int64)


def classes_of_test_rows_alone(class_names: Sequence[str], train: Labels, test: Labels) -> tuple[str, ...]:
    """Return a note for each class that has test rows and no training row."""
    counts = np.bincount(test, minlength=len(class_names))
    only = set(np.unique(test).tolist()).difference(np.unique(train).tolist())
    return tuple(
        f"Class {class_names[index]!r} has {counted(int(counts[index]), 'test row')} and no training row, so it cannot "
        "be learned."
        for index in sorted(only)
    )


def _refuse_alike(counts: Counter[Any], label: str, faults: Faults) -> None:
    """Add a fault for classes that differ only by blanks or capital letters: they are spellings of one class."""
    alike = defaultdict(list)
    for word in sorted(value for value in counts if isinstance(value, str)):
        alike[" ".join(word.split()).casefold()].append(word)
    for words in alike.values():
        if len(words) > 1:
            shown = ", ".join(f"{word!r} ({counted(counts[word], 'row')})" for word in words)
            differ = "blanks" if len({" ".join(word.split()) for word in words}) == 1 else "capital letters"
            faults.add(f"label={label!r} has classes that differ by {differ} only: {shown}; write them alike")

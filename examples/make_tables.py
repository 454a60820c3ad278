"""Write the made-up people of the examples: `python examples/make_tables.py [FOLDER]`. The same files every time.

    people.csv      one table of all columns and the label, `left`: whether a customer has left
    new_people.csv  other people, without the label
    later.csv       the same other people a year later, when it is known who left
    bank.csv        the same people as in people.csv, with the bank's columns and the label
    shop.csv        the same people, with the shop's columns, in another order; some people are in one file only
    schema.json     what everybody may know of the columns, written by hand and not from the table

Nobody in them exists. The label depends on columns of both organisations, and on chance.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

BANK = ("age", "income", "debt", "job", "owns_home")
SHOP = ("visits", "basket", "channel", "member")
JOBS = {"clerk": 0.2, "cook": -0.1, "driver": 0.7, "nurse": -0.5, "teacher": -0.8, "none": 0.9}
CHANNELS = {"app": -0.9, "street": -0.1, "web": 0.8}
#: How a missing value is written: files of real life have more than one way.
MARKS = {"age": "", "income": "NA", "debt": "NA", "job": "?", "owns_home": "", "basket": "", "channel": "?"}
MISSING_SHARE = 0.04
#: How far columns decide: with all of them known, one in seven is still guessed wrong.
STRENGTH, SHIFT = 2.2, -0.7

SCHEMA: dict[str, Any] = {
    "columns": {
        "age": {"range": [18, 100], "missing": True},
        "income": {"range": [0, 8000], "missing": True},
        "debt": {"range": [0, 60000], "missing": True},
        "job": {"vocabulary": ["clerk", "cook", "driver", "nurse", "teacher", "none"], "other": True, "missing": True},
        "owns_home": {"vocabulary": [False, True], "missing": True},
        "visits": {"range": [0, 40]},
        "basket": {"range": [0, 200], "missing": True},
        "channel": {"vocabulary": ["app", "street", "web"], "missing": True},
        "member": {"vocabulary": [False, True]},
    }
}


def people(rng: np.random.Generator, count: int, *, first: int) -> list[dict[str, Any]]:
    """So many people with whole values, and whether each of them left."""
    age = np.clip(rng.normal(46, 15, count), 18, 97).astype(int)
    income = np.round(np.exp(rng.normal(7.75, 0.45, count)), -1).astype(int)
    debt = np.round(np.where(rng.random(count) < 0.35, 0, rng.gamma(1.6, 7000, count)), -2).astype(int)
    job = rng.choice(list(JOBS), count, p=[0.24, 0.14, 0.18, 0.16, 0.16, 0.12])
    home = rng.random(count) < 0.25 + 0.007 * (age - 18)
    visits = rng.poisson(np.exp(rng.normal(1.9, 0.6, count)))
    basket = np.round(rng.gamma(2.5, 16, count), 1)
    channel = rng.choice(list(CHANNELS), count, p=[0.35, 0.4, 0.25])
    member = rng.random(count) < 0.45
    at_bank = (
        -0.5 * (age - 46) / 15
        - 0.5 * (np.log(income) - 7.75) / 0.45
        + 0.6 * (debt - 7000) / 9000
        + np.array([JOBS[each] for each in job])
        - 0.5 * home
    )
    at_shop = (
        -0.7 * (visits - 8) / 5
        - 0.4 * (basket - 40) / 25
        + np.array([CHANNELS[each] for each in channel])
        - 0.9 * (member - 0.45)
    )
    left = rng.random(count) < 1 / (1 + np.exp(-(STRENGTH * (at_bank + at_shop) + SHIFT)))
    return [
        {
            "customer": f"c{first + i:05d}",
            "age": int(age[i]),
            "income": int(income[i]),
            "debt": int(debt[i]),
            "job": str(job[i]),
            "owns_home": str(bool(home[i])).lower(),
            "visits": int(visits[i]),
            "basket": float(basket[i]),
            "channel": str(channel[i]),
            "member": str(bool(member[i])).lower(),
            "left": "yes" if left[i] else "no",
        }
        for i in range(count)
    ]


def with_holes(rng: np.random.Generator, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some values are missing, whoever the person is."""

    def value(row: dict[str, Any], name: str) -> Any:
        return MARKS[name] if name in MARKS and rng.random() < MISSING_SHARE else row[name]

    return [{name: value(row, name) for name in row} for row in rows]


def write(path: Path, names: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(folder: Path) -> None:
    rng = np.random.default_rng(20)
    known = with_holes(rng, people(rng, 1500, first=0))
    new = with_holes(rng, people(rng, 200, first=1500))
    write(folder / "people.csv", ("customer", *BANK, *SHOP, "left"), known)
    write(folder / "new_people.csv", ("customer", *BANK, *SHOP), new)
    write(folder / "later.csv", ("customer", *BANK, *SHOP, "left"), new)
    # Each organisation knows some people whom the other does not know.
    at_bank, at_shop = (rng.permutation(known)[:1450].tolist() for _ in range(2))
    write(folder / "bank.csv", ("customer", *BANK, "left"), at_bank)
    write(folder / "shop.csv", ("customer", *SHOP), at_shop)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rule)}" for name, rule in SCHEMA["columns"].items())
    (folder / "schema.json").write_text(f'{{"columns": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

"""Tables of many sorts, each made from a seed: one family that rules are tuned on, and another to judge them by.

The two families have different generators. Every table has training rows, hold-out rows, on which anything may be
chosen, and test rows, which are looked at once. Columns are as `load_table` gives them: numbers scaled to [-1, 1] by a
public range, words as one-hot columns. Ranges are round numbers that somebody would write without seeing the values.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Random = np.random.Generator

#: Rows that made tables have beside the training rows.
HOLD_OUT_ROWS, TEST_ROWS = 4_000, 8_000


@dataclass(frozen=True, kw_only=True)
class Table:
    """One vertical table in three splits; `parts` has an array a party."""

    name: str
    num_classes: int
    train: tuple[Floats, ...]
    train_labels: Indices
    hold_out: tuple[Floats, ...]
    hold_out_labels: Indices
    test: tuple[Floats, ...]
    test_labels: Indices
    column_values: int | None = None
    #: Whether columns have public ranges, as those of tables with a schema have.
    has_ranges: bool = True

    @property
    def num_parties(self) -> int:
        return len(self.train)

    @property
    def num_samples(self) -> int:
        return len(self.train_labels)

    @property
    def columns(self) -> int:
        """Return the largest number of columns of any party."""
        return max(int(part.shape[1]) for part in self.train)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of every party's columns (`pbmvfl.plan.shapes`): all have a range, but one-hot words."""
        if self.column_values is not None:
            return tuple("v" * part.shape[1] for part in self.train)
        if not self.has_ranges:
            return ()
        return tuple(_kinds_of(part) for part in self.train)

    @property
    def majority(self) -> float:
        """Return the share, in the test rows, of the most frequent class of the training rows."""
        common = np.bincount(self.train_labels, minlength=self.num_classes).argmax()
        return float((self.test_labels == common).mean())


def _kinds_of(part: Floats) -> str:
    """Return u for a number, and b, w for the first and another slot of a word: slots of a word add up to 1."""
    found, slots = "", np.zeros(len(part))
    for column in part.T:
        if not np.isin(column, (0, 1)).all():
            found += "u"
            continue
        found += "w" if slots.any() else "b"
        slots = slots + column
        if (slots == 1).all():
            slots = np.zeros(len(part))
    return found


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Parameters of a generated table."""

    kind: str
    seed: int
    rows: int
    parties: int
    columns: int  #: of each party, before words become one-hot
    classes: int = 2
    rare: float = 0.5  #: about the share of the second of two classes

    @property
    def name(self) -> str:
        share = f" {round(100 * (1 - self.rare))}/{round(100 * self.rare)}" if self.classes == 2 else ""
        return f"{self.kind} {self.rows:,}x{self.parties}x{self.columns} {self.classes}{share}"


def scaled(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.float64]:
    """Scale by a public range, as tables with a schema are."""
    return np.asarray((np.clip(values, low, high) - low) / (high - low) * 2 - 1)


def one_hot(codes_N: npt.NDArray[Any], width: int) -> npt.NDArray[np.float64]:
    return np.asarray(np.eye(width)[codes_N])


def _two(random: Random, logit_N: npt.NDArray[Any], rare: float) -> Indices:
    """Draw two classes, the second with about this share."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-(logit_N + middle)))).mean() < rare else (low, middle)
    return np.asarray(random.random(len(logit_N)) < 1 / (1 + np.exp(-(logit_N + low))), np.int64)


def _many(random: Random, scores_NK: npt.NDArray[Any]) -> Indices:
    """Draw classes by the shares of their scores."""
    return np.asarray((scores_NK + random.gumbel(size=scores_NK.shape)).argmax(axis=1), np.int64)


def _weights(random: Random, *shape: int) -> npt.NDArray[np.float64]:
    return random.normal(size=shape)


Made = tuple[list[npt.NDArray[Any]], Indices]


# --- the family that rules are tuned on ---


def _normal(random: Random, recipe: Recipe, rows: int) -> Made:
    """Normal columns, a linear logit."""
    parts = [random.normal(size=(rows, recipe.columns)) for _ in range(recipe.parties)]
    total = np.sum([part @ _weights(random, recipe.columns, recipe.classes) for part in parts], axis=0)
    scores = 3 * total / np.std(total)
    labels = _two(random, scores[:, 1], recipe.rare) if recipe.classes == 2 else _many(random, scores)
    return [scaled(part, -5, 5) for part in parts], labels


def _heavy(random: Random, recipe: Recipe, rows: int) -> Made:
    """Amounts with long tails, whose logarithms matter; their public range is far too wide."""
    parts = [np.exp(random.normal(size=(rows, recipe.columns))) for _ in range(recipe.parties)]
    total = np.sum([np.log(part) @ _weights(random, recipe.columns) for part in parts], axis=0)
    return [scaled(part, 0, 50) for part in parts], _two(random, 3 * total / np.std(total), recipe.rare)


def _words(random: Random, recipe: Recipe, rows: int) -> Made:
    """Words of 2 to 8 kinds, not equally frequent, each with an effect."""
    parts, total = [], np.zeros((rows, recipe.classes))
    for _ in range(recipe.parties):
        held = []
        for _ in range(recipe.columns):
            kinds = int(random.integers(2, 9))
            codes = random.choice(kinds, size=rows, p=random.dirichlet(np.full(kinds, 1.5)))
            held.append(one_hot(codes, kinds))
            total += _weights(random, kinds, recipe.classes)[codes]
        parts.append(np.concatenate(held, axis=1))
    scores = 3 * total / np.std(total)
    return parts, _two(random, scores[:, 1], recipe.rare) if recipe.classes == 2 else _many(random, scores)


def _inside(random: Random, recipe: Recipe, rows: int) -> Made:
    """Products of columns of one party matter as much as the columns."""
    parts = [random.normal(size=(rows, recipe.columns)) for _ in range(recipe.parties)]
    total = np.zeros(rows)
    for part in parts:
        total += part @ _weights(random, recipe.columns) / np.sqrt(recipe.columns)
        for _ in range(2):
            one, other = random.choice(recipe.columns, 2, replace=False)
            total += part[:, one] * part[:, other]
    return [scaled(part, -4, 4) for part in parts], _two(random, 3.5 * total / np.std(total), recipe.rare)


def _mixture(random: Random, recipe: Recipe, rows: int) -> Made:
    """A normal cloud a class; columns of a party lean on each other."""
    labels = random.choice(recipe.classes, size=rows, p=random.dirichlet(np.full(recipe.classes, 4.0)))
    parts = []
    for _ in range(recipe.parties):
        mixing = random.normal(size=(recipe.columns, recipe.columns)) / np.sqrt(recipe.columns)
        centres = random.normal(size=(recipe.classes, recipe.columns)) * 2.5 / np.sqrt(recipe.columns * recipe.parties)
        parts.append(scaled((centres[labels] + random.normal(size=(rows, recipe.columns))) @ mixing, -10, 10))
    return parts, np.asarray(labels, np.int64)


def _mixed(random: Random, recipe: Recipe, rows: int) -> Made:
    """Amounts, words and yes-or-no side by side, columns of very different spread, and a fifth of labels by chance."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        held = []
        for column in range(recipe.columns):
            if column % 3 == 0:
                spread = float(10 ** random.uniform(-1.5, 0))
                values = random.normal(size=rows)
                held.append(scaled(values * spread, -5, 5)[:, None])
                total += random.normal() * values
            elif column % 3 == 1:
                kinds = int(random.integers(3, 7))
                codes = random.choice(kinds, size=rows, p=random.dirichlet(np.ones(kinds)))
                held.append(one_hot(codes, kinds))
                total += random.normal(size=kinds)[codes]
            else:
                answers = random.random(rows) < random.uniform(0.02, 0.5)
                held.append(one_hot(answers.astype(int), 2))
                total += random.normal() * 1.5 * answers
        parts.append(np.concatenate(held, axis=1))
    labels = _two(random, 3 * total / np.std(total), recipe.rare)
    chance = random.random(rows) < 0.2
    return parts, np.where(chance, (random.random(rows) < recipe.rare).astype(np.int64), labels)


# --- a family that was held out at first, and is looked at since ---


def _trees(random: Random, recipe: Recipe, rows: int) -> Made:
    """Every party's columns go down a tree of three questions; leaves vote."""
    parts = [random.beta(2, 5, size=(rows, recipe.columns)) for _ in range(recipe.parties)]
    total = np.zeros((rows, recipe.classes))
    for part in parts:
        asked = random.choice(recipe.columns, 3, replace=recipe.columns < 3)
        leaf = sum((part[:, column] > random.uniform(0.15, 0.4)).astype(int) << bit for bit, column in enumerate(asked))
        total += random.normal(size=(8, recipe.classes))[leaf]
    scores = 3 * total / np.std(total)
    labels = _two(random, scores[:, 1], recipe.rare) if recipe.classes == 2 else _many(random, scores)
    return [scaled(part, 0, 1) for part in parts], labels


def _fraud(random: Random, recipe: Recipe, rows: int) -> Made:
    """A rare class whose amounts and places are others; classes come first, columns after."""
    labels = (random.random(rows) < recipe.rare).astype(np.int64)
    parts = []
    for _ in range(recipe.parties):
        held = []
        for column in range(recipe.columns):
            if column % 4 == 3:
                kinds = 6
                usual, odd = random.dirichlet(np.ones(kinds) * 2), random.dirichlet(np.ones(kinds))
                codes = np.where(labels == 1, random.choice(kinds, rows, p=odd), random.choice(kinds, rows, p=usual))
                held.append(one_hot(codes, kinds))
            else:
                moved = random.normal() * 0.8
                amounts = random.standard_t(4, size=rows) + moved * labels
                held.append(scaled(amounts, -20, 20)[:, None])
        parts.append(np.concatenate(held, axis=1))
    return parts, labels


def _counts(random: Random, recipe: Recipe, rows: int) -> Made:
    """Counts of events of different frequency; the label counts some of them."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        rates = random.uniform(0.2, 6, size=recipe.columns)
        counts = random.poisson(rates * random.gamma(2, 0.5, size=(rows, 1)))
        total += (counts / np.sqrt(rates)) @ random.normal(size=recipe.columns)
        parts.append(scaled(counts, 0, 30))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _prototypes(random: Random, recipe: Recipe, rows: int) -> Made:
    """Pictures of black and white points: a prototype a class, points flipped by chance."""
    labels = random.integers(0, recipe.classes, size=rows)
    parts = []
    for _ in range(recipe.parties):
        pattern = random.random((recipe.classes, recipe.columns)) < 0.4
        flipped = random.random((rows, recipe.columns)) < 0.35
        parts.append((pattern[labels] ^ flipped) * 2.0 - 1)
    return parts, np.asarray(labels, np.int64)


def _factors(random: Random, recipe: Recipe, rows: int) -> Made:
    """A few traits of a person that every party sees in its own noisy way."""
    traits = random.normal(size=(rows, 3))
    total = traits @ random.normal(size=(3, recipe.classes))
    parts = []
    for _ in range(recipe.parties):
        seen = traits @ random.normal(size=(3, recipe.columns)) + 1.5 * random.normal(size=(rows, recipe.columns))
        parts.append(scaled(seen, -8, 8))
    scores = 4 * total / np.std(total)
    return parts, _two(random, scores[:, 1], recipe.rare) if recipe.classes == 2 else _many(random, scores)


def _survey(random: Random, recipe: Recipe, rows: int) -> Made:
    """Answers from 1 to 5, some questions nearly always answered alike; a tenth of labels wrong."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        mood = random.normal(size=(rows, 1))
        felt = 0.7 * mood + random.normal(size=(rows, recipe.columns)) + random.normal(size=recipe.columns)
        answers = np.clip(np.rint(felt + 3), 1, 5)
        total += (felt * random.normal(size=recipe.columns)).sum(axis=1) / np.sqrt(recipe.columns) + mood[:, 0]
        parts.append(scaled(answers, 1, 5))
    labels = _two(random, 3 * total / np.std(total), recipe.rare)
    wrong = random.random(rows) < 0.1
    return parts, np.where(wrong, (random.random(rows) < recipe.rare).astype(np.int64), labels)


def _either(random: Random, recipe: Recipe, rows: int) -> Made:
    """Each party has two columns of which exactly one must be high, beside columns that matter by themselves."""
    parts = [random.uniform(-1, 1, size=(rows, recipe.columns)) for _ in range(recipe.parties)]
    total = np.zeros(rows)
    for part in parts:
        total += 1.5 * np.sign(part[:, 0] * part[:, 1]) + 1.5 * part[:, 2:] @ random.normal(size=recipe.columns - 2)
    return parts, _two(random, 2.5 * total / np.std(total), recipe.rare)


# --- a second one ---


def _claims(random: Random, recipe: Recipe, rows: int) -> Made:
    """Mostly zeros, now and then an amount; the label is about the sum of roots of amounts, and about flags."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        held = []
        for column in range(recipe.columns):
            happened = random.random(rows) < random.uniform(0.1, 0.5)
            if column % 3 == 2:
                held.append(one_hot(happened.astype(int), 2))
                total += random.normal() * happened
            else:
                amounts = np.where(happened, random.gamma(1.5, 2.0, size=rows), 0)
                held.append(scaled(amounts, 0, 20)[:, None])
                total += random.normal() * np.sqrt(amounts)
        parts.append(np.concatenate(held, axis=1))
    return parts, _two(random, 3.5 * total / np.std(total), recipe.rare)


def _sensors(random: Random, recipe: Recipe, rows: int) -> Made:
    """Readings over time of something that swings: how fast it swings depends on the class; neighbours are alike."""
    labels = random.integers(0, recipe.classes, size=rows)
    times = np.arange(recipe.columns) / 4
    parts = []
    for _ in range(recipe.parties):
        speeds = random.uniform(0.3, 2.5, size=recipe.classes)[labels] + 0.15 * random.normal(size=rows)
        phases = random.uniform(-0.8, 0.8, size=rows)
        swings = np.sin(speeds[:, None] * times + phases[:, None]) + 0.6 * random.normal(size=(rows, recipe.columns))
        parts.append(scaled(swings, -4, 4))
    return parts, np.asarray(labels, np.int64)


def _clinic(random: Random, recipe: Recipe, rows: int) -> Made:
    """Values of which too low is as bad as too high, beside some that are bad when high; a word for the ward."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        values = random.normal(size=(rows, recipe.columns))
        effects = random.normal(size=recipe.columns)
        odd = random.random(recipe.columns) < 0.3
        total += np.where(odd, np.abs(values) - 0.8, values) @ effects
        wards = random.choice(4, size=rows, p=random.dirichlet(np.full(4, 3.0)))
        total += random.normal(size=4)[wards]
        parts.append(np.concatenate((scaled(values, -6, 6), one_hot(wards, 4)), axis=1))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _topics(random: Random, recipe: Recipe, rows: int) -> Made:
    """Counts of words in a text about a topic; every party counts other words."""
    labels = random.choice(recipe.classes, size=rows, p=random.dirichlet(np.full(recipe.classes, 6.0)))
    parts = []
    for _ in range(recipe.parties):
        rates = random.gamma(0.6, 1.2, size=(recipe.classes, recipe.columns))
        parts.append(scaled(random.poisson(rates[labels] * random.gamma(3, 1 / 3, size=(rows, 1))), 0, 15))
    return parts, np.asarray(labels, np.int64)


def _clicks(random: Random, recipe: Recipe, rows: int) -> Made:
    """Words of a few kinds, and an effect of every two that a party has; hardly anything else."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        codes = [random.choice(4, size=rows, p=random.dirichlet(np.full(4, 4.0))) for _ in range(recipe.columns)]
        for one in range(recipe.columns):
            total += 0.5 * random.normal(size=4)[codes[one]]
            for other in range(one):
                total += random.normal(size=(4, 4))[codes[one], codes[other]]
        parts.append(np.concatenate([one_hot(each, 4) for each in codes], axis=1))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _grades(random: Random, recipe: Recipe, rows: int) -> Made:
    """Classes in an order, cut out of one ability; marks of it that cannot be above the best one."""
    ability = random.normal(size=rows)
    parts = []
    for _ in range(recipe.parties):
        marks = ability[:, None] * random.uniform(0.3, 1.2, size=recipe.columns) + random.normal(
            size=(rows, recipe.columns)
        )
        parts.append(scaled(np.minimum(np.round(marks * 2) / 2, 1.5), -5, 5))
    cuts = np.quantile(ability, np.cumsum(random.dirichlet(np.full(recipe.classes, 5.0)))[:-1])
    return parts, np.asarray(np.searchsorted(cuts, ability + 0.2 * random.normal(size=rows)), np.int64)


def _copies(random: Random, recipe: Recipe, rows: int) -> Made:
    """Two organisations that know nearly the same about everybody, and others that know nothing."""
    known = random.laplace(size=(rows, recipe.columns))
    total = known @ random.normal(size=recipe.columns)
    parts = [scaled(known + 0.3 * random.normal(size=known.shape), -10, 10) for _ in range(2)]
    parts += [scaled(random.laplace(size=known.shape), -10, 10) for _ in range(recipe.parties - 2)]
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


# --- a third one ---


def _loans(random: Random, recipe: Recipe, rows: int) -> Made:
    """Debt per income at every bank, age, and place."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        income, debt = np.exp(0.5 * random.normal(size=rows)), np.exp(0.7 * random.normal(size=rows))
        total += np.log(debt / income) * random.uniform(0.5, 1.5)
        others = random.uniform(18, 80, size=(rows, recipe.columns - 2))
        total += ((others - 49) / 18) @ random.normal(size=recipe.columns - 2) * 0.7
        towns = random.choice(5, size=rows, p=random.dirichlet(np.full(5, 2.0)))
        total += 0.7 * random.normal(size=5)[towns]
        numbers = np.column_stack((scaled(income, 0, 10), scaled(debt, 0, 20), scaled(others, 0, 120)))
        parts.append(np.concatenate((numbers, one_hot(towns, 5)), axis=1))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _weather(random: Random, recipe: Recipe, rows: int) -> Made:
    """Stations in a row, neighbours alike; classes by how much of it all is above some level."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        walk = np.cumsum(random.normal(size=(rows, recipe.columns)), axis=1) / np.sqrt(np.arange(1, recipe.columns + 1))
        total += np.tanh(2 * walk) @ random.normal(size=recipe.columns)
        parts.append(scaled(walk, -5, 5))
    total += 0.3 * np.std(total) * random.normal(size=rows)
    cuts = np.quantile(total, np.arange(1, recipe.classes) / recipe.classes)
    return parts, np.asarray(np.searchsorted(cuts, total), np.int64)


def _genes(random: Random, recipe: Recipe, rows: int) -> Made:
    """Many columns that say nothing, and a few that do."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        levels = random.gamma(4, 0.25, size=(rows, recipe.columns))
        total += levels[:, :4] @ random.normal(size=4)
        parts.append(scaled(levels, 0, 4))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _ballots(random: Random, recipe: Recipe, rows: int) -> Made:
    """Yes, no or nothing to some questions, by the camp that somebody is in; camps of different size."""
    labels = random.choice(recipe.classes, size=rows, p=random.dirichlet(np.full(recipe.classes, 5.0)))
    parts = []
    for _ in range(recipe.parties):
        lean = random.normal(size=(recipe.classes, recipe.columns))
        felt = lean[labels] + 1.2 * random.normal(size=(rows, recipe.columns))
        parts.append(np.where(np.abs(felt) < 0.5, 0, np.sign(felt)))
    return parts, np.asarray(labels, np.int64)


def _stocks(random: Random, recipe: Recipe, rows: int) -> Made:
    """Changes with very long tails in ranges that hold them all; three labels of ten by chance."""
    parts = [random.standard_t(2.5, size=(rows, recipe.columns)) for _ in range(recipe.parties)]
    total = np.sum([np.tanh(part) @ random.normal(size=recipe.columns) for part in parts], axis=0)
    labels = _two(random, 5 * total / np.std(total), recipe.rare)
    chance = random.random(rows) < 0.3
    drawn = (random.random(rows) < recipe.rare).astype(np.int64)
    return [scaled(part, -30, 30) for part in parts], np.where(chance, drawn, labels)


def _regions(random: Random, recipe: Recipe, rows: int) -> Made:
    """Numbers that count for more in one region than in another, where both are with one party."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        where = random.choice(4, size=rows, p=random.dirichlet(np.full(4, 5.0)))
        numbers = random.uniform(-1, 1, size=(rows, recipe.columns))
        total += (numbers * (random.normal(size=recipe.columns) + random.normal(size=(4, recipe.columns))[where])).sum(
            1
        )
        parts.append(np.concatenate((numbers, one_hot(where, 4)), axis=1))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


# --- the family that is held out ---


def _triage(random: Random, recipe: Recipe, rows: int) -> Made:
    """Vital signs that are harmless in between, a word for the complaint; degrees of urgency."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        signs = random.normal(size=(rows, recipe.columns))
        low, high = random.uniform(-1.5, -0.5, recipe.columns), random.uniform(0.5, 1.5, recipe.columns)
        total += (np.maximum(low - signs, 0) + np.maximum(signs - high, 0)) @ random.gamma(2, 1, size=recipe.columns)
        complaint = random.choice(5, size=rows, p=random.dirichlet(np.full(5, 3.0)))
        total += random.normal(size=5)[complaint]
        parts.append(np.concatenate((scaled(signs, -5, 5), one_hot(complaint, 5)), axis=1))
    total += 0.3 * np.std(total) * random.normal(size=rows)
    cuts = np.quantile(total, np.cumsum(random.dirichlet(np.full(recipe.classes, 4.0)))[:-1])
    return parts, np.asarray(np.searchsorted(cuts, total), np.int64)


def _orders(random: Random, recipe: Recipe, rows: int) -> Made:
    """Counts whose meaning depends on the day of the week, and amounts that matter by their logarithm."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        day = random.integers(0, 7, size=rows)
        counts = random.poisson(random.uniform(1, 8, size=recipe.columns - 1), size=(rows, recipe.columns - 1))
        total += ((counts - counts.mean(axis=0)) * random.normal(size=(7, recipe.columns - 1))[day]).sum(axis=1)
        amount = np.exp(1.5 * random.normal(size=rows))
        total += 2 * random.normal() * np.log(amount)
        numbers = np.column_stack((scaled(counts, 0, 25), scaled(amount, 0, 100)))
        parts.append(np.concatenate((numbers, one_hot(day, 7)), axis=1))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _soil(random: Random, recipe: Recipe, rows: int) -> Made:
    """Skewed contents of a ground sample, whose levels depend on the sort of ground."""
    labels = random.choice(recipe.classes, size=rows, p=random.dirichlet(np.full(recipe.classes, 5.0)))
    parts = []
    for _ in range(recipe.parties):
        levels = random.normal(size=(recipe.classes, recipe.columns)) * 0.5
        parts.append(scaled(np.exp(levels[labels] + 0.8 * random.normal(size=(rows, recipe.columns))), 0, 12))
    return parts, np.asarray(labels, np.int64)


def _transit(random: Random, recipe: Recipe, rows: int) -> Made:
    """Times of the day, around which something rises and falls, and distances."""
    parts, total = [], np.zeros(rows)
    for _ in range(recipe.parties):
        hours = random.uniform(0, 24, size=(rows, 2))
        for column in range(2):
            total += np.sin(2 * np.pi * (hours[:, column] - random.uniform(0, 24)) / random.choice([12, 24]))
        distances = random.gamma(2, 1, size=(rows, recipe.columns - 2))
        total += (distances - 2) @ random.normal(size=recipe.columns - 2) * 0.4
        parts.append(np.column_stack((scaled(hours, 0, 24), scaled(distances, 0, 15))))
    return parts, _two(random, 3 * total / np.std(total), recipe.rare)


def _panel(random: Random, recipe: Recipe, rows: int) -> Made:
    """The same question asked again and again; what counts is a straight line through the answers."""
    parts, total = [], np.zeros((rows, recipe.classes))
    for _ in range(recipe.parties):
        answers = np.zeros((rows, recipe.columns))
        answers[:, 0] = random.normal(size=rows)
        for column in range(1, recipe.columns):
            answers[:, column] = 0.7 * answers[:, column - 1] + 0.7 * random.normal(size=rows)
        total += answers @ random.normal(size=(recipe.columns, recipe.classes))
        parts.append(scaled(answers, -4, 4))
    return parts, _many(random, 3 * total / np.std(total))


def _tickets(random: Random, recipe: Recipe, rows: int) -> Made:
    """Words of a report, each with its own say, one number of minutes; the desk that it goes to."""
    parts, total = [], np.zeros((rows, recipe.classes))
    for _ in range(recipe.parties):
        held = []
        for _ in range(recipe.columns):
            kinds = int(random.integers(3, 8))
            codes = random.choice(kinds, size=rows, p=random.dirichlet(np.full(kinds, 2.0)))
            held.append(one_hot(codes, kinds))
            total += random.normal(size=(kinds, recipe.classes))[codes]
        minutes = random.gamma(1.5, 20, size=rows)
        total += np.sqrt(minutes)[:, None] * random.normal(size=recipe.classes) * 0.3
        parts.append(np.concatenate((*held, scaled(minutes, 0, 240)[:, None]), axis=1))
    return parts, _many(random, 4 * total / np.std(total))


_KINDS: dict[str, Callable[[Random, Recipe, int], Made]] = {
    "normal": _normal,
    "heavy": _heavy,
    "words": _words,
    "inside": _inside,
    "mixture": _mixture,
    "mixed": _mixed,
    "trees": _trees,
    "fraud": _fraud,
    "counts": _counts,
    "prototypes": _prototypes,
    "factors": _factors,
    "survey": _survey,
    "either": _either,
    "claims": _claims,
    "sensors": _sensors,
    "clinic": _clinic,
    "topics": _topics,
    "clicks": _clicks,
    "grades": _grades,
    "copies": _copies,
    "loans": _loans,
    "weather": _weather,
    "genes": _genes,
    "ballots": _ballots,
    "stocks": _stocks,
    "regions": _regions,
    "triage": _triage,
    "orders": _orders,
    "soil": _soil,
    "transit": _transit,
    "panel": _panel,
    "tickets": _tickets,
}

TUNING = (
    Recipe(kind="normal", seed=17, rows=150, parties=3, columns=4, classes=3),
    Recipe(kind="mixture", seed=18, rows=300, parties=2, columns=6, classes=3),
    Recipe(kind="words", seed=19, rows=500, parties=3, columns=2, rare=0.2),
    Recipe(kind="normal", seed=1, rows=500, parties=2, columns=4),
    Recipe(kind="normal", seed=2, rows=4_000, parties=4, columns=20, rare=0.1),
    Recipe(kind="normal", seed=3, rows=30_000, parties=3, columns=8, rare=0.05),
    Recipe(kind="normal", seed=4, rows=10_000, parties=5, columns=30, classes=6),
    Recipe(kind="heavy", seed=5, rows=3_000, parties=3, columns=6),
    Recipe(kind="heavy", seed=6, rows=20_000, parties=2, columns=5, rare=0.2),
    Recipe(kind="words", seed=7, rows=1_500, parties=3, columns=3),
    Recipe(kind="words", seed=8, rows=15_000, parties=4, columns=8, rare=0.2),
    Recipe(kind="words", seed=9, rows=6_000, parties=2, columns=4, classes=4),
    Recipe(kind="inside", seed=10, rows=5_000, parties=3, columns=5),
    Recipe(kind="inside", seed=11, rows=40_000, parties=4, columns=10, rare=0.3),
    Recipe(kind="mixture", seed=12, rows=2_000, parties=3, columns=12, classes=5),
    Recipe(kind="mixture", seed=13, rows=12_000, parties=4, columns=40, classes=10),
    Recipe(kind="mixed", seed=14, rows=1_000, parties=2, columns=9),
    Recipe(kind="mixed", seed=15, rows=8_000, parties=3, columns=12, rare=0.15),
    Recipe(kind="mixed", seed=16, rows=25_000, parties=6, columns=6, rare=0.05),
)
FIRST_HELD_OUT = (
    Recipe(kind="trees", seed=101, rows=2_500, parties=3, columns=6),
    Recipe(kind="trees", seed=102, rows=20_000, parties=4, columns=10, classes=5),
    Recipe(kind="fraud", seed=103, rows=6_000, parties=2, columns=8, rare=0.05),
    Recipe(kind="fraud", seed=104, rows=50_000, parties=3, columns=12, rare=0.05),
    Recipe(kind="counts", seed=105, rows=800, parties=2, columns=5),
    Recipe(kind="counts", seed=106, rows=10_000, parties=5, columns=15, rare=0.15),
    Recipe(kind="prototypes", seed=107, rows=1_500, parties=4, columns=16, classes=10),
    Recipe(kind="prototypes", seed=108, rows=9_000, parties=3, columns=100, classes=8),
    Recipe(kind="factors", seed=109, rows=500, parties=3, columns=3),
    Recipe(kind="factors", seed=110, rows=5_000, parties=6, columns=25, classes=4),
    Recipe(kind="factors", seed=111, rows=30_000, parties=2, columns=10, rare=0.1),
    Recipe(kind="survey", seed=112, rows=3_000, parties=4, columns=12, rare=0.3),
    Recipe(kind="survey", seed=113, rows=15_000, parties=2, columns=40),
    Recipe(kind="either", seed=114, rows=4_000, parties=3, columns=4),
    Recipe(kind="either", seed=115, rows=30_000, parties=2, columns=8, rare=0.25),
)
SECOND_HELD_OUT = (
    Recipe(kind="claims", seed=201, rows=1_200, parties=3, columns=6),
    Recipe(kind="claims", seed=202, rows=18_000, parties=4, columns=9, rare=0.08),
    Recipe(kind="sensors", seed=203, rows=2_000, parties=3, columns=16, classes=4),
    Recipe(kind="sensors", seed=204, rows=8_000, parties=2, columns=60, classes=8),
    Recipe(kind="clinic", seed=205, rows=600, parties=2, columns=6, rare=0.3),
    Recipe(kind="clinic", seed=206, rows=12_000, parties=5, columns=10, rare=0.05),
    Recipe(kind="topics", seed=207, rows=3_000, parties=3, columns=30, classes=5),
    Recipe(kind="topics", seed=208, rows=1_000, parties=4, columns=12, classes=10),
    Recipe(kind="clicks", seed=209, rows=2_500, parties=3, columns=3),
    Recipe(kind="clicks", seed=210, rows=25_000, parties=3, columns=4, rare=0.2),
    Recipe(kind="grades", seed=211, rows=900, parties=3, columns=5, classes=3),
    Recipe(kind="grades", seed=212, rows=20_000, parties=6, columns=8, classes=5),
    Recipe(kind="copies", seed=213, rows=5_000, parties=4, columns=10, rare=0.15),
    Recipe(kind="copies", seed=214, rows=50_000, parties=2, columns=4, rare=0.4),
)
THIRD_HELD_OUT = (
    Recipe(kind="loans", seed=301, rows=1_500, parties=3, columns=4, rare=0.2),
    Recipe(kind="loans", seed=302, rows=20_000, parties=2, columns=6, rare=0.08),
    Recipe(kind="weather", seed=303, rows=800, parties=2, columns=8, classes=3),
    Recipe(kind="weather", seed=304, rows=9_000, parties=4, columns=20, classes=6),
    Recipe(kind="genes", seed=305, rows=2_000, parties=3, columns=80),
    Recipe(kind="genes", seed=306, rows=12_000, parties=2, columns=60, rare=0.3),
    Recipe(kind="ballots", seed=307, rows=1_000, parties=4, columns=15, classes=4),
    Recipe(kind="ballots", seed=308, rows=5_000, parties=3, columns=30, classes=10),
    Recipe(kind="stocks", seed=309, rows=3_000, parties=3, columns=5),
    Recipe(kind="stocks", seed=310, rows=40_000, parties=6, columns=6, rare=0.35),
    Recipe(kind="regions", seed=311, rows=4_000, parties=3, columns=3),
    Recipe(kind="regions", seed=312, rows=15_000, parties=2, columns=5, rare=0.05),
)
HELD_OUT = (
    Recipe(kind="triage", seed=401, rows=3_000, parties=3, columns=5, classes=4),
    Recipe(kind="triage", seed=402, rows=10_000, parties=2, columns=8, classes=3),
    Recipe(kind="orders", seed=403, rows=2_500, parties=2, columns=4, rare=0.3),
    Recipe(kind="orders", seed=404, rows=12_000, parties=3, columns=4, rare=0.15),
    Recipe(kind="soil", seed=405, rows=1_500, parties=3, columns=6, classes=5),
    Recipe(kind="soil", seed=406, rows=8_000, parties=4, columns=8, classes=8),
    Recipe(kind="transit", seed=407, rows=4_000, parties=3, columns=4),
    Recipe(kind="panel", seed=408, rows=2_000, parties=2, columns=10, classes=3),
    Recipe(kind="panel", seed=409, rows=10_000, parties=3, columns=24),
    Recipe(kind="tickets", seed=410, rows=6_000, parties=3, columns=3, classes=6),
)
#: Public tables: those on which rules have been chosen, or that have been looked at, and one that is judged by.
PUBLIC_TUNING = ("phishing", "activity", "digits", "breast_cancer", "wine", "iris", "diabetes")
PUBLIC_HELD_OUT = ("modelnet10",)
LOOKED_AT = (*TUNING, *FIRST_HELD_OUT, *SECOND_HELD_OUT, *THIRD_HELD_OUT)
FAMILIES = {
    "tuning": (*(recipe.name for recipe in LOOKED_AT), *PUBLIC_TUNING),
    "held-out": (*(recipe.name for recipe in HELD_OUT), *PUBLIC_HELD_OUT),
}
_BUNDLED = ("breast_cancer", "wine", "iris", "diabetes")


def load(name: str) -> Table:
    """Load a table of either family."""
    for recipe in (*LOOKED_AT, *HELD_OUT):
        if recipe.name == name:
            return made(recipe)
    return _bundled(name) if name in _BUNDLED else _named(name)


def made(recipe: Recipe, *, hold_out_rows: int = HOLD_OUT_ROWS, test_rows: int = TEST_ROWS) -> Table:
    """Generate the table of a recipe, the same at every call."""
    random = np.random.default_rng(recipe.seed)
    parts, labels = _KINDS[recipe.kind](random, recipe, recipe.rows + hold_out_rows + test_rows)
    whole = [np.ascontiguousarray(part, dtype=np.float32) for part in parts]
    ends = (recipe.rows, recipe.rows + hold_out_rows)
    return _split(recipe.name, recipe.classes, whole, labels, ends)


def _split(
    name: str, classes: int, parts: list[Floats], labels: Indices, ends: tuple[int, int], values: int | None = None
) -> Table:
    first, second = ends
    return Table(
        name=name,
        num_classes=classes,
        train=tuple(part[:first] for part in parts),
        train_labels=labels[:first],
        hold_out=tuple(part[first:second] for part in parts),
        hold_out_labels=labels[first:second],
        test=tuple(part[second:] for part in parts),
        test_labels=labels[second:],
        column_values=values,
    )


def _bundled(name: str) -> Table:
    """Load one of scikit-learn's tables in a fixed order: a fifth to choose on, a fifth to judge by.

    Ranges are round numbers around what the documentation of the table says.
    """
    from sklearn import datasets

    if name == "diabetes":  # a measure of how the illness goes on: above 140, which is near its median, or not
        found = datasets.load_diabetes(scaled=False)
        target, classes = (found.target > 140).astype(np.int64), 2
    else:
        found = getattr(datasets, f"load_{name}")()
        target, classes = found.target.astype(np.int64), len(found.target_names)
    order = np.random.default_rng(7).permutation(len(target))
    top = np.array([float(f"{value:.0e}") * 1.5 for value in found.data.max(axis=0)])
    columns = np.column_stack([scaled(found.data[order, at], 0, top[at]) for at in range(found.data.shape[1])])
    parts = [np.ascontiguousarray(part, dtype=np.float32) for part in np.array_split(columns, 3, axis=1)]
    rows = len(order)
    ends = (rows - 2 * (rows // 5), rows - rows // 5)
    return _split(name, classes, parts, target[order], ends)


def _named(name: str) -> Table:
    """Load one of the program's tables: the last fifth of the training rows to choose on (for Activity other people).

    Its own test rows are those to judge by.
    """
    from pbmvfl.data.datasets import load_dataset
    from pbmvfl.plan.plan import Plan
    from pbmvfl.training.features import mapped

    data = load_dataset(name, num_parties={"phishing": 5, "activity": 5}.get(name), progress=False)
    kept = data.num_samples - data.num_samples // 5
    # Pictures as the planner's own plan for them takes them; other columns are as they are.
    plan = Plan.for_budget(epsilon=8, num_parties=2, num_samples=1, num_classes=2)
    train, test = (
        tuple(mapped(plan, part, index=index) for index, part in enumerate(parts))
        for parts in (data.train_features, data.test_features)
    )
    order = np.arange(data.num_samples)
    if name == "modelnet10":  # its rows are sorted by class
        order = np.random.default_rng(7).permutation(data.num_samples)
    return Table(
        name=name,
        num_classes=data.num_classes,
        train=tuple(part[order[:kept]] for part in train),
        train_labels=data.train_labels[order[:kept]],
        hold_out=tuple(part[order[kept:]] for part in train),
        hold_out_labels=data.train_labels[order[kept:]],
        test=test,
        test_labels=data.test_labels,
        column_values=data.column_values,
        has_ranges=data.columns is not None,
    )

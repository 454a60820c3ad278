"""Any sequence of training, predictions and acts of owners: no cell's true total is above its limit without permission.

A Hypothesis state machine drives a federation over twelve people as a program or a person could: it trains under any
names of parties and datasets, predicts people by name, a few at a time and again, or from files without ids, looks at
exact figures, reloads the model, removes stored answers, copies the ledgers' folder, goes on with a copy or puts an
older one back. Owners set, change and remove limits, add parties, allow names, permit and accept.

The oracle reads what left each party from bytes on the wire and adds it up for every person and every column, whatever
the row, the party or the dataset was called. What a sum of releases tells is computed from the definitions: binary
randomised response and Gaussian noise together, as the exact hockey-stick divergence. Permissions count only if they
are in a ledger's history, which is read from the file. Nothing of `pbmvfl.privacy` or `pbmvfl.ledger` is in it.

The controls put back what was wrong before, one hole at a time: the machine finds each.

PBMVFL_STATEFUL=N multiplies the number of sequences, which is otherwise chosen for CI; `-s` shows what was run:

    PBMVFL_STATEFUL=100 pytest -n0 -s tests/system/test_model_state_machine.py -k any_sequence
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import pbmvfl
from pbmvfl import FederatedModel, Federation, Ledger, Limit, ReleaseOptions
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import LedgerError, PbmvflError
from pbmvfl.ledger import ledger_folder
from pbmvfl.ledger.database import file_name
from pbmvfl.ledger.store import LedgerStore
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.units import Accounting, Unit
from support.limited_people import EACH, EMBEDDING, WHO, load_people, plan_of, write_people

PEOPLE, TRAINED = 12, 8
NOISE, DELTA = 30.0, 1e-5
OWNER = {column: party for party, columns in WHO.items() for column in columns}
#: Who holds which column: as its owner calls himself, and otherwise.
NAMINGS = {
    "as they are": WHO,
    "another case": {"Bank": WHO["bank"], "shop": WHO["shop"]},
    "second ones": {"bank-2": WHO["bank"], "shop-2": WHO["shop"]},
    "regrouped": {"bank": ["debt"], "shop": ["basket"], "all": ["income", "visits"]},
}
PREDICTION, LOCAL, MEAN, GRAM, FUSION = 2, 3, 4, 5, 9
#: (distance between neighbours / deviation)^2 of one round of training, which uses every row once but fusion rows. A
#: clipped row can be replaced by its opposite: distance 2; a row of a noisy sum of products by another: sqrt(2).
SHIFTS = {LOCAL: (2 / NOISE) ** 2, MEAN: (2 / NOISE) ** 2, GRAM: 2 / NOISE**2}


# --- the oracle ---


class Overspent(AssertionError):
    """A cell has more than its owner permits."""


@functools.cache
def delta_at(epsilon: float, answers: int, shift: float) -> float:
    """sup P(S) - e^epsilon Q(S) for so many binary randomised answers of EACH and normal laws that far apart.

    The number of true answers is binomial under P, and each way to have so many has a likelihood ratio of its own; on
    top of it comes the normal's.
    """
    true, mu = 1 / (1 + math.exp(-EACH)), math.sqrt(shift)
    total = 0.0
    for right in range(answers + 1):
        weight = math.comb(answers, right) * true**right * (1 - true) ** (answers - right)
        loss = EACH * (2 * right - answers)
        need = epsilon - loss
        if mu:
            above = [0.5 * math.erfc((need / mu + side * mu / 2) / math.sqrt(2)) for side in (-1, 1)]
        else:
            above = [float(need < 0)] * 2
        total += weight * above[0] - math.exp(epsilon - loss) * weight * above[1]
    return total


@dataclass
class Total:
    """What left about one person's column."""

    answers: int = 0
    shift: float = 0.0


@dataclass
class Truth:
    """What really left, by account, column and person; and what owners permit, by their own acts.

    An account is a ledger and a dataset for which an owner set a limit. A release under any other name is one about the
    same people, and counts in every account of the column's owner.
    """

    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    totals: dict[tuple[str, str], dict[tuple[str, int], Total]] = field(default_factory=dict)

    def add(self, party: str, dataset: str, column: str, people: Sequence[int], what: Total) -> None:
        accounts = [(party, dataset)]
        if accounts[0] not in self.limits:
            accounts += [each for each in self.limits if each[0] == OWNER[column]]
        for account in accounts:
            for person in people:
                total = self.totals.setdefault(account, {}).setdefault((column, person), Total())
                total.answers += what.answers
                total.shift += what.shift
                if account in self.limits:
                    self.check(account, column, person, total)

    def check(self, account: tuple[str, str], column: str, person: int, total: Total) -> None:
        limit = self.limits[account]
        if (found := delta_at(limit, total.answers, round(total.shift, 12))) > DELTA * (1 + 1e-9):
            raise Overspent(
                f"person {person}, {column}: {total} in {account}, whose limit is epsilon {limit} at delta {DELTA}; "
                f"at that epsilon delta is {found:.3g}"
            )

    def check_exact(self, parties: dict[str, list[str]], noted: set[str]) -> None:
        """Exact figures tell everything: every owner with a limit must have permitted them."""
        limited = {party for party, _ in self.limits}
        for party, columns in parties.items():
            asked = {party} if party in limited else {OWNER[column] for column in columns} & limited
            if not asked <= noted:
                raise Overspent(f"exact figures of {columns}, held as {party}, without permission of {asked - noted}")

    def of_ledger(self, party: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
        return (
            {each: value for each, value in self.limits.items() if each[0] == party},
            {each: value for each, value in self.totals.items() if each[0] == party},
        )

    def take_over(self, party: str, other: Truth) -> None:
        """The owner takes an older ledger as it is: what it does not know is permitted, and its limits hold."""
        for mine, theirs in zip((self.limits, self.totals), other.of_ledger(party), strict=True):
            for each in [each for each in mine if each[0] == party]:
                del mine[each]
            mine.update(deepcopy(theirs))


def history(folder: Path, party: str) -> list[dict[str, Any]]:
    """Events of a ledger, as they stand in the file."""
    path = folder / file_name(party)
    if not path.is_file() or not path.stat().st_size:
        return []
    with contextlib.closing(sqlite3.connect(path)) as file:
        return [json.loads(text) for (text,) in file.execute("SELECT event FROM history ORDER BY id")]


# --- what is asked ---


@functools.cache
def table(naming: str, dataset: str, named: bool = True) -> VerticalDataset:
    """Persons 0 to 7 to train on, 8 to 11 to test with."""
    with tempfile.TemporaryDirectory() as folder:
        train = write_people(Path(folder) / "train.csv", range(TRAINED))
        test = write_people(Path(folder) / "test.csv", range(TRAINED, PEOPLE))
        return load_people(train, test=test, id="person" if named else None, who=NAMINGS[naming], name=dataset)


@functools.cache
def plan(naming: str, evaluation: str) -> Plan:
    noises = dict.fromkeys(("noise_multiplier", "mean_noise", "gram_noise"), NOISE)
    return plan_of(table(naming, "people"), batch_size=TRAINED, evaluation=evaluation, **noises)


def used_in(kind: int) -> list[int]:
    """Persons whose rows a round of training uses: every plan here has one batch, and the same public draw."""
    return next(each for each in plan("as they are", "none").schedule if each.kind.code == kind).rows.tolist()


def rows_of(naming: str, dataset: str, people: Sequence[int]) -> NewRows:
    data = table(naming, "people")
    both = [np.concatenate(parts) for parts in zip(data.train_features, data.test_features, strict=True)]
    return NewRows(
        name=dataset,
        party_names=data.party_names,
        features=tuple(part[list(people)] for part in both),
        ids=tuple(f"p{person}" for person in people),
    )


@dataclass
class Copy:
    """A copy of the ledgers' folder, and what was true when it was made or charged last."""

    folder: Path
    truth: Truth


#: Few people at a time, who overlap; some of them were trained on.
FEW = st.sampled_from([(8,), (0,), (8, 9), (0, 8), (7, 8, 9), (0, 1, 9, 10), (11, 8), (1,)])
#: The names that rows are given: mostly the owners'.
CALLED = st.sampled_from(["people"] * 4 + ["folk", "nobody"])
COPIES = st.sampled_from([None, None, None, 0, 1])
EPSILONS = st.sampled_from([3.0, 5.0, 5.0, 9.0])


class Machine(RuleBasedStateMachine):
    """One folder of ledgers, one model at a time, and everything that can happen to them."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="pbmvfl-machine-"))
        self._state = os.environ["PBMVFL_STATE"]
        os.environ["PBMVFL_STATE"] = str(self.folder / "state")
        self.books = self.folder / "books"
        self.truth, self.copies, self.files = Truth(), [], 0
        #: Parties whose ledgers in `books` may be older ones, and what those know.
        self.behind: dict[str, Truth] = {}
        self.model: FederatedModel | None = None
        self.naming, self.models = "as they are", 0
        #: What was answered last, by model, party, dataset and row id, as long as the party can have it stored.
        self.stored: dict[tuple[int, int, str, str], int] = {}
        self.counts["sequences"] += 1

    def teardown(self) -> None:
        os.environ["PBMVFL_STATE"] = self._state
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what left ---

    def _watch(self, naming: str, dataset: str, people: Sequence[int], names: Sequence[str], left: list[Any]) -> Any:
        """A tap that notes every answer: party, columns, persons, and what it tells about each.

        An answer to a row id that was answered before under the dataset's name tells nothing if it is the same one;
        without `names` none are stored.
        """
        parties = list(NAMINGS[naming].items())

        def tap(direction: str, party: int, message: bytes) -> None:
            if direction != "up" or message[5] != EMBEDDING:
                return
            name, columns = parties[party]
            kind = message[40]
            if kind != PREDICTION:
                what = Total(answers=1) if kind == FUSION else Total(shift=SHIFTS[kind])
                left.append((name, dataset, columns, used_in(kind), what))
                return
            bits = np.unpackbits(np.frombuffer(message[44:], dtype=np.uint8), bitorder="little")
            new = []
            for i, (person, symbol) in enumerate(zip(people, bits.tolist(), strict=False)):
                known = (self.models, party, dataset, names[i] if names else "")
                if not names or self.stored.get(known) != symbol:
                    new.append(person)
                self.stored[known] = symbol
            left.append((name, dataset, columns, new, Total(answers=1)))

        return tap

    def _noted(self, folder: Path, what: str) -> Counter[str]:
        """How many permissions of this kind each ledger has."""
        parties = {party for naming in NAMINGS.values() for party in naming}
        found = {party: [event for event in history(folder, party) if event["what"] == what] for party in parties}
        return Counter({party: sum(each.get("exact_metrics", True) for each in found[party]) for party in parties})

    def _do(
        self,
        what: str,
        ask: Callable[[], Any],
        left: list[Any],
        *,
        copy: Copy | None = None,
        permission: str | None = None,
        exact: dict[str, list[str]] | None = None,
    ) -> Any:
        """Do it, and compare what left with what owners permit. A refusal is as good as an answer."""
        folder = self.books if copy is None else copy.folder
        before = Counter() if permission is None else self._noted(folder, permission)
        if copy is not None:  # whatever comes of it, the ledgers in `books` do not get to know
            self.behind = {party: deepcopy(self.truth) for party in self._parties(folder)} | self.behind
        self.counts["steps"] += 1
        found = None
        try:
            found = ask()
        except PbmvflError:
            self.counts[f"{what}: refused"] += 1
        else:
            self.counts[f"{what}: done"] += 1
        noted: set[str] = set() if permission is None else {*(self._noted(folder, permission) - before)}
        self.counts["permissions noted"] += bool(noted)
        for party, dataset, columns, people, total in left:
            self.counts["cells released"] += len(columns) * len(people)
            if copy is None and permission != "uncharged":
                self.behind.pop(party, None)
            if permission == "uncharged" and party in noted:
                continue
            for column in columns:
                self.truth.add(party, dataset, column, people, total)
        if exact is not None and found is not None:
            self.truth.check_exact(exact, noted)
        for party in {party for party, *_ in left} if copy is not None else ():
            copy.truth.take_over(party, self.truth)
        return found

    def _copy(self, number: int | None) -> Copy | None:
        return None if number is None or not self.copies else self.copies[number % len(self.copies)]

    # --- programs ---

    @initialize(limit=st.one_of(st.none(), EPSILONS, EPSILONS, EPSILONS))
    def begin(self, limit: float | None) -> None:
        """With a model, and mostly with a limit."""
        first = trained_before()
        shutil.copytree(first.folder, self.folder, dirs_exist_ok=True)
        self.truth, self.models = deepcopy(first.truth), 1
        self._load()
        if limit is not None:
            self._set_limits("people", limit)

    def train_as(self, naming: str, dataset: str, evaluation: str, *, named: bool = True, **how: Any) -> None:
        data = table(naming, dataset, named)
        federation, left = Federation(plan(naming, evaluation)), []
        federation.taps.append(self._watch(naming, dataset, range(TRAINED, PEOPLE), (), left))
        looks = evaluation == "simulator"
        result = self._do(
            "train",
            lambda: federation.fit(data, ledger=self.books, **how),
            left,
            permission="opened" if looks else None,
            exact=NAMINGS[naming] if looks else None,
        )
        if result is not None and result.model is not None:
            self.naming, self.models = naming, self.models + 1
            result.model.save(self.folder / f"model-{self.models}")
            self._load()

    def _load(self) -> None:
        self.model = pbmvfl.load(self.folder / f"model-{self.models}", ledger=self.books)

    @rule(
        naming=st.sampled_from(["as they are"] * 3 + sorted(NAMINGS)),
        dataset=CALLED,
        evaluation=st.sampled_from(["none", "none", "released", "simulator"]),
        named=st.sampled_from([True, True, True, False]),
        exact_metrics=st.booleans(),
        until_limit=st.booleans(),
    )
    def train(
        self, naming: str, dataset: str, evaluation: str, named: bool, exact_metrics: bool, until_limit: bool
    ) -> None:
        how = {"exact_metrics": exact_metrics, "until_limit": until_limit}
        self.train_as(naming, dataset, evaluation, named=named, **how)

    def _predict(self, rows: Any, people: Sequence[int], dataset: str, copy: Copy | None = None, **how: Any) -> None:
        model, left = self.model, []
        assert model is not None
        stem = f"{rows.stem}:" if isinstance(rows, Path) else ""  # what rows without ids are called
        names = [f"{stem}{i}" if stem else f"p{person}" for i, person in enumerate(people)]
        model.taps = [self._watch(self.naming, dataset, people, names, left)]
        folder = self.books if copy is None else copy.folder
        self._do(
            "uncharged" if how.get("uncharged") else "predict",
            lambda: model.release(rows, ReleaseOptions(ledger=folder, **how), dataset=dataset),
            left,
            copy=copy,
            permission="uncharged" if how.get("uncharged") else None,
        )

    @precondition(lambda self: self.model is not None)
    @rule(people=FEW, dataset=CALLED, copy=COPIES, until_limit=st.booleans())
    def predict(self, people: Sequence[int], dataset: str, copy: int | None, until_limit: bool) -> None:
        rows = rows_of(self.naming, dataset, people)
        self._predict(rows, people, dataset, self._copy(copy), until_limit=until_limit)

    @precondition(lambda self: self.model is not None)
    @rule(people=FEW, form=st.sampled_from(["named", "new file", "same file", "test rows", "uncharged"]))
    def ask(self, people: Sequence[int], form: str) -> None:
        """About the owners' people, in whatever form."""
        if form == "test rows":
            self._predict(table(self.naming, "people"), range(TRAINED, PEOPLE), "people")
        elif form.endswith("file"):
            self.files += form == "new file"
            path = write_people(self.folder / f"file-{self.files}.csv", people, label=False)
            self._predict(path, people, "people")
        else:
            self._predict(rows_of(self.naming, "people", people), people, "people", uncharged=form == "uncharged")

    @precondition(lambda self: self.model is not None)
    @rule(people=FEW, dataset=CALLED, copy=COPIES, permitted=st.booleans())
    def look_exactly(self, people: Sequence[int], dataset: str, copy: int | None, permitted: bool) -> None:
        model, used = self.model, self._copy(copy)
        assert model is not None
        folder = self.books if used is None else used.folder
        rows = rows_of(self.naming, dataset, people)
        self._do(
            "exact",
            lambda: model.release(rows, ReleaseOptions(exact=True, exact_metrics=permitted, ledger=folder)),
            [],
            copy=used,
            permission="exact",
            exact=NAMINGS[self.naming],
        )

    @precondition(lambda self: self.model is not None)
    @rule(forgets=st.sampled_from(["object", "first party", "all parties"]))
    def forget(self, forgets: str) -> None:
        """What the object remembers; also what parties have stored."""
        self.counts["steps"] += 1
        self._load()
        parties = {"object": 0, "first party": 1}.get(forgets)
        for number, party in enumerate(list(NAMINGS[self.naming])[:parties]):
            shutil.rmtree(self.folder / f"model-{self.models}" / party / "answers", ignore_errors=True)
            self.stored = {each: old for each, old in self.stored.items() if each[:2] != (self.models, number)}

    # --- copies ---

    @precondition(lambda self: self.books.is_dir())
    @rule(number=st.integers(0, 1), puts_back=st.booleans())
    def copy(self, number: int, puts_back: bool) -> None:
        """Copy the folder; or put a copy back, over the files that are there. A ledger that is not in the copy stays:
        of one that was removed nobody knows."""
        self.counts["steps"] += 1
        if not puts_back or not self.copies:
            folder = self.folder / f"copy-{len(self.copies)}"
            shutil.copytree(self.books, folder)
            self.copies.append(Copy(folder, deepcopy(self.truth)))
            for party, known in self.behind.items():
                self.copies[-1].truth.take_over(party, known)
            return
        copy = self._copy(number)
        assert copy is not None
        self.counts["copies put back"] += 1
        for path in copy.folder.iterdir():
            for ending in ("-wal", "-shm"):
                (self.books / (path.name + ending)).unlink(missing_ok=True)
            shutil.copy2(path, self.books / path.name)
        self.behind |= {party: deepcopy(copy.truth) for party in self._parties(copy.folder)}

    # --- owners ---

    def _owner(self, party: str) -> Ledger:
        return Ledger(self.books / file_name(party), owner=party)

    def _parties(self, folder: Path | None = None) -> list[str]:
        """Those that have a ledger."""
        parties = {party for naming in NAMINGS.values() for party in naming}
        return sorted(party for party in parties if ((folder or self.books) / file_name(party)).is_file())

    def _set_limits(self, dataset: str, epsilon: float) -> None:
        limit = Limit.choose(unit="cell", accounting="strict", epsilon=epsilon, delta=DELTA)
        for party in self._parties():
            with contextlib.closing(self._owner(party)) as ledger:
                ledger.set_limit(dataset, limit)
            self.truth.limits[party, dataset] = epsilon
            self.behind.pop(party, None)

    @rule(
        act=st.sampled_from(["set limits", "set limits", "remove limits", "add parties", "allow", "accept"]),
        dataset=st.sampled_from(["people", "people", "folk"]),
        epsilon=EPSILONS,
        naming=st.sampled_from(["as they are"] * 3 + sorted(NAMINGS)),
    )
    def owner(self, act: str, dataset: str, epsilon: float, naming: str) -> None:
        """An act of owners, for all ledgers of the folder, as the commands have it."""
        self.counts["steps"] += 1
        with contextlib.suppress(PbmvflError):  # an older copy is not changed
            if act == "set limits":
                self._set_limits(dataset, epsilon)
            elif act == "remove limits":
                self._remove_limits(dataset)
            elif act == "add parties":
                self._add_parties(naming, epsilon)
            elif act == "allow":
                self._allow(dataset)
            else:
                self._accept()
            self.counts[act] += 1

    def _remove_limits(self, dataset: str) -> None:
        for party in self._parties():
            if (party, dataset) in self.truth.limits:
                with contextlib.closing(self._owner(party)) as ledger:
                    ledger.remove_limit(dataset, Unit.CELL, Accounting.STRICT, 0)
                del self.truth.limits[party, dataset]
                self.behind.pop(party, None)

    def _add_parties(self, naming: str, epsilon: float) -> None:
        """By the command that a refusal names."""
        known = self._parties()
        for party in NAMINGS[naming]:
            if party not in known:
                limit = Limit.choose(unit="cell", accounting="strict", epsilon=epsilon, delta=DELTA)
                with contextlib.closing(Ledger(self.books / file_name(party))) as ledger:
                    ledger.set_limit("people", limit)
                self.truth.limits[party, "people"] = epsilon

    def _allow(self, dataset: str) -> None:
        for party in self._parties():
            with contextlib.closing(self._owner(party)) as ledger:
                ledger.allow(dataset)
            self.behind.pop(party, None)

    def _accept(self) -> None:
        """Ledgers as they are, where something is wrong with them."""
        for party in self._parties():
            with contextlib.closing(self._owner(party)) as ledger:
                found = ledger.accept()
            if found is not None:
                assert history(self.books, party)[-2]["what"] == "accepted"
                self.truth.take_over(party, self.behind.pop(party))


@functools.cache
def trained_before() -> Copy:
    """What every sequence begins with: ledgers, state and a model, made once."""
    machine = Machine()
    machine.train_as("as they are", "people", "none")
    folder = Path(tempfile.mkdtemp(prefix="pbmvfl-machine-"))
    shutil.copytree(machine.folder, folder, dirs_exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    machine.teardown()
    return Copy(folder, machine.truth)


def run(examples: int, machine: type[Machine] = Machine, **choices: Any) -> None:
    trained_before()
    Machine.counts.clear()
    checks = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **choices,
    )
    run_state_machine_as_test(machine, settings=checks)


EXAMPLES = 14


def test_no_total_is_above_its_limit_after_any_sequence(record_property):
    run(EXAMPLES * int(os.environ.get("PBMVFL_STATEFUL", "1")))
    found = Machine.counts
    record_property("counts", json.dumps(found))
    print(json.dumps(found, indent=2, sort_keys=True))
    assert found["cells released"], "nothing was released in any sequence"
    assert found["predict: refused"] + found["train: refused"], "no sequence came to a limit"


# --- controls: what was wrong before ---


def names_of_rows_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pbmvfl.federation.federation", "pbmvfl.federation.model"):
        monkeypatch.setattr(
            f"{module}.ledger_files_for",
            lambda folder, rows, *_: ledger_folder.ledger_files_of(folder, rows.party_names, dataset=rows.name),
        )


def any_party_begins_a_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def ledger_files_of(folder: Path, parties: Sequence[str], *, dataset: str, **_: Any) -> list[Path]:
        return [
            ledger_folder.ledger_file_of(folder, index, party, dataset=dataset) for index, party in enumerate(parties)
        ]

    for module in ("pbmvfl.ledger.ledger_folder", "pbmvfl.federation.serving"):
        monkeypatch.setattr(f"{module}.ledger_files_of", ledger_files_of)


def limits_of_another_dataset_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(parts: Sequence[Any], folder: Path, dataset: str, *, permitted: bool) -> None:
        for part in parts:
            with contextlib.closing(Ledger(folder / file_name(part.party))) as ledger:
                if ledger.limits(dataset):
                    if not permitted:
                        raise LedgerError("exact sums")
                    ledger.note_exact(dataset)

    monkeypatch.setattr("pbmvfl.federation.model.look_exactly", look)


def older_copies_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LedgerStore, "trouble", lambda _: None)


@pytest.mark.parametrize(
    ("sabotage", "number"),
    [
        (names_of_rows_are_not_asked_for, 25),
        (any_party_begins_a_ledger, 25),
        (limits_of_another_dataset_are_not_looked_at, 25),
        (older_copies_are_taken, 18),
    ],
)
def test_the_machine_finds_what_was_wrong(sabotage, number, monkeypatch):
    """With seeds that find it soon: any other does too, and takes longer."""
    sabotage(monkeypatch)
    machine = seed(number)(type("Seeded", (Machine,), {}))
    with pytest.raises(Overspent) as found:
        run(200, machine, phases=[Phase.generate], database=None, print_blob=False)
    print(sabotage.__name__, dict(Machine.counts), found.value)

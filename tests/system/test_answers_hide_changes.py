"""Answers that are kept tell nothing about columns that changed: not by their bytes, not by a charge, not by a refusal.

Two worlds are compared that differ in cells of the rows that are asked about, with the same numbers drawn in both. What
a row was told first is released once and charged; from then on both worlds must look alike until the owner says that
the data are another version, and then every row is drawn and charged anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pbmvfl import FederatedModel, Federation, Ledger, Limit, Plan, ReleaseOptions, load
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import BudgetExceeded, DataError
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.round_kinds import KINDS
from pbmvfl.protocol.stored_answers import StoredAnswers
from pbmvfl.training.encoders import build_encoder, weights_digest
from pbmvfl.training.preparation import preparation_for
from support.known_randomness import KnownSetup
from support.local_plans import voting_plan

PARTIES = ("bank", "shop")
RESPONSE, DELTA = 1.5, 1e-5
HEADER, KIND, ROUND_KIND = 44, 5, 40
EMBEDDING, PREDICTION = 6, 2
COUNT = 40
ALL = tuple(range(COUNT))


def table(**choices: Any) -> VerticalDataset:
    known = np.random.default_rng(5)
    labels = known.integers(0, 2, size=80)
    parts = [(known.normal(size=(80, 3)) + labels[:, None]).astype(np.float32) / 4 for _ in PARTIES]
    usual: dict[str, Any] = {
        "name": "people",
        "party_names": PARTIES,
        "train_features": tuple(part[:60] for part in parts),
        "test_features": tuple(part[60:] for part in parts),
        "train_labels": labels[:60],
        "test_labels": labels[60:],
        "class_names": ("no", "yes"),
        "default_encoder": "linear",
    }
    return VerticalDataset(**{**usual, **choices})


def plan_of(data: VerticalDataset, **choices: Any) -> Plan:
    usual: dict[str, Any] = {"prediction_response_epsilon": RESPONSE, "num_epochs": 2, "batch_size": 60}
    return voting_plan(data, **{**usual, "evaluation": "none", **choices})


def people(which: Sequence[int] = ALL, *, moved: Sequence[int] = (), seed: int = 9, **choices: Any) -> NewRows:
    """New people by name; the bank has other columns of those that moved: far at the other side of all others."""
    known = np.random.default_rng(seed)
    columns = [known.normal(size=(COUNT, 3)).astype(np.float32) / 4 for _ in PARTIES]
    columns[0][list(moved)] *= -40
    usual: dict[str, Any] = {"name": "people", "ids": tuple(f"new{row}" for row in which)}
    features = tuple(part[list(which)] for part in columns)
    return NewRows(party_names=PARTIES, features=features, **{**usual, **choices})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on a disk, which no ledger knows: each world charges one of its own."""
    data = table()
    model = Federation(plan_of(data)).fit(data).model
    assert model is not None
    return model.save(tmp_path_factory.mktemp("trained") / "model")


@pytest.fixture(scope="module")
def trained_for_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose rows are released as noisy sums, of which no party keeps answers."""
    data = table()
    law = {"vote": "shares", "prediction_mechanism": "laplace", "prediction_scale": 90.0}
    model = Federation(plan_of(data, **law, prediction_secure_aggregation=True)).fit(data).model
    assert model is not None
    return model.save(tmp_path_factory.mktemp("trained for sums") / "model")


@dataclasses.dataclass
class Seen:
    """All that one question shows: what left each party, what each ledger was charged, and how it ended."""

    sent: list[tuple[int, bytes]]
    charged: list[int]
    ended: str
    scores: np.ndarray | None

    def without_numbers(self) -> Any:
        return [(party, len(data)) for party, data in self.sent], self.charged, self.ended


class World:
    """A model, the ledgers of its parties, and numbers that are drawn alike in every world."""

    def __init__(self, folder: Path, trained: Path, *, limit: float | None = None) -> None:
        self.folder, self.asked = folder, 0
        shutil.copytree(trained, folder / "model")
        for party in PARTIES:
            with contextlib.closing(Ledger(folder / "books" / f"{party}.sqlite", owner=party)) as book:
                if limit is not None:
                    chosen = Limit.choose(unit="cell", accounting="strict", epsilon=limit, delta=DELTA, order=64.0)
                    book.set_limit("people", chosen)
        self.start_anew()

    def start_anew(self) -> None:
        """Another program: nothing is remembered but what is on the disk."""
        self.model = load(self.folder / "model", ledger=self.folder / "books")

    def row_releases(self) -> list[int]:
        found = []
        for party in PARTIES:
            with contextlib.closing(Ledger(self.folder / "books" / f"{party}.sqlite", read_only=True)) as book:
                found.append(sum(entry.row_releases for entry in book.sessions("people")))
        return found

    def ask(self, rows: NewRows, **how: Any) -> Seen:
        self.asked += 1
        self.model._setup_kind = type("Known", (KnownSetup,), {"seed": f"question {self.asked}".encode()})
        sent: list[tuple[int, bytes]] = []

        def tap(way: str, party: int, message: bytes) -> None:
            if way == "up" and message[KIND] == EMBEDDING and message[ROUND_KIND] == PREDICTION:
                sent.append((party, message[HEADER:]))

        self.model.taps = [tap]
        before, ended, scores = self.row_releases(), "", None
        try:
            found = self.model.release(rows, ReleaseOptions(**how))
            ended, scores = found.stopped, found.scores_NK
        except BudgetExceeded as refused:
            ended = str(refused).replace(str(self.folder), "")
        charged = [now - then for now, then in zip(self.row_releases(), before, strict=True)]
        return Seen(sent, charged, ended, scores)


@pytest.fixture
def worlds(tmp_path: Path, trained: Path) -> tuple[World, World]:
    return World(tmp_path / "a", trained), World(tmp_path / "b", trained)


# --- the attack: which rows changed since the last question? ---


@pytest.mark.parametrize("remembered", [True, False], ids=["the same object", "another program"])
def test_a_cell_that_changed_changes_no_answer_and_costs_nothing(worlds, remembered):
    here, there = worlds
    first = here.ask(people())
    assert there.ask(people()).sent == first.sent  # the same numbers are drawn in both worlds
    assert first.charged == [COUNT, COUNT]
    for moved in ([], [3], [7, 8, 9], list(range(20))):
        for which in (ALL, tuple(reversed(ALL)), ALL[5:25]):
            if not remembered:
                here.start_anew()
                there.start_anew()
            one, other = here.ask(people(which)), there.ask(people(which, moved=moved))
            assert other.sent == one.sent
            assert other.charged == one.charged == [0, 0]
            assert np.array_equal(one.scores, first.scores[list(which)])
            assert np.array_equal(other.scores, one.scores)


def test_at_a_limit_rows_that_changed_are_answered_as_others_are(tmp_path, trained):
    """A limit for one release: a second one is refused, whatever changed; the first one is told again, likewise."""
    here, there = (World(tmp_path / name, trained, limit=1.2 * RESPONSE) for name in ("a", "b"))
    assert here.ask(people()).sent == there.ask(people()).sent
    for which in ([3], [3, 4], list(ALL)):
        here.start_anew()
        there.start_anew()
        one, other = here.ask(people(which)), there.ask(people(which, moved=[3]))
        assert other.without_numbers() == one.without_numbers()
        assert other.sent == one.sent
        assert (one.ended, one.charged) == ("", [0, 0])
    said = [each.forecast(people(moved=moved)) for each, moved in ((here.model, []), (there.model, [3]))]
    assert [[limit.stops_at for limit in book.limits] for book in said[0]] == [[None], [None]]
    assert [[limit.will_be for limit in book.limits] for book in said[0]] == [
        [limit.will_be for limit in book.limits] for book in said[1]
    ]
    refused = [here.ask(people(), data_version="2"), there.ask(people(moved=[3]), data_version="2")]
    assert refused[0].without_numbers() == refused[1].without_numbers()
    assert "Nothing was sent" in refused[0].ended
    assert refused[0].charged == [0, 0]


@pytest.fixture
def summed(trained_for_sums: Path, tmp_path: Path) -> list[World]:
    return [World(tmp_path / name, trained_for_sums) for name in ("sums-a", "sums-b")]


def test_sums_that_cannot_be_repeated_are_told_again_by_the_same_object_whatever_changed(summed):
    """A law by which no party keeps answers: what the object remembers is known by names as well."""
    here, there = summed
    first = here.ask(people())
    assert first.charged == [COUNT, COUNT]
    assert there.ask(people()).without_numbers() == first.without_numbers()
    one, other = here.ask(people()), there.ask(people(moved=[3]))
    assert other.without_numbers() == one.without_numbers() == ([], [0, 0], "")
    assert np.array_equal(one.scores, first.scores)
    here.start_anew()
    there.start_anew()
    one, other = here.ask(people()), there.ask(people(moved=[3]))
    assert other.without_numbers() == one.without_numbers()
    assert one.charged == [COUNT, COUNT]


QUESTIONS = st.fixed_dictionaries(
    {
        "which": st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True),
        "moved": st.lists(st.integers(0, 7), max_size=4, unique=True),
        "version": st.sampled_from(["", "", "2"]),
        "anew": st.booleans(),
    }
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(questions=[{"which": [0, 1], "moved": moved, "version": "", "anew": False} for moved in ([], [1])])
@given(questions=st.lists(QUESTIONS, min_size=2, max_size=6))
def test_any_questions_about_any_changes_look_alike_and_have_the_first_answers(questions, trained, tmp_path_factory):
    """Charges and refusals at a limit of one release, and each row's scores, against what was told of it first."""
    folder = tmp_path_factory.mktemp("worlds")
    here, there = (World(folder / name, trained, limit=1.2 * RESPONSE) for name in ("a", "b"))
    told: list[dict[tuple[str, int], np.ndarray]] = [{}, {}]
    spent = dict.fromkeys(range(8), 0)
    try:
        for asked in questions:
            which, version = asked["which"], asked["version"]
            if asked["anew"]:
                here.start_anew()
                there.start_anew()
            new = [row for row in which if (version, row) not in told[0]]
            refused = any(spent[row] for row in new)
            how = {"data_version": version} if version else {}
            seen = [here.ask(people(which), **how), there.ask(people(which, moved=asked["moved"]), **how)]
            assert seen[0].without_numbers() == seen[1].without_numbers()
            assert bool(seen[0].ended) == refused
            assert seen[0].charged == ([0, 0] if refused else [len(new)] * 2)
            if refused:
                continue
            for known, each in zip(told, seen, strict=True):
                assert each.scores is not None
                for row, score in zip(which, each.scores, strict=True):
                    assert np.array_equal(known.setdefault((version, row), score), score)
            for row in new:
                spent[row] += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- the owner says that data changed ---


def test_another_version_is_drawn_and_charged_for_all_rows_and_the_first_one_stays(worlds):
    here, _ = worlds
    first = here.ask(people())
    second = here.ask(people(), data_version="2026-02")
    assert second.charged == [COUNT, COUNT]  # no matter that no column changed
    assert all(one != other for (_, one), (_, other) in zip(first.sent, second.sent, strict=True))  # 0.7^80 to be equal
    here.start_anew()
    for version, answers in (("", first), ("2026-02", second)):
        again = here.ask(people(), data_version=version)
        assert (again.sent, again.charged) == (answers.sent, [0, 0])


@pytest.mark.parametrize("version", [None, 3, " 2", "2\n", "x" * 81])
def test_a_version_that_is_no_name_is_refused_before_anything_is_released(worlds, version):
    here, _ = worlds
    with pytest.raises(DataError, match=r"data_version=.*permitted: a text of at most 80 characters"):
        here.ask(people(), data_version=version)
    assert here.row_releases() == [0, 0]


# --- no answer is given to somebody else ---


def test_the_same_id_under_another_name_is_somebody_else(worlds):
    """One store, two datasets: an id is a person only together with the name of the people."""
    here, _ = worlds
    first = here.ask(people())
    strangers = people(name="others", seed=10)
    others = here.ask(strangers)
    assert others.sent != first.sent
    with contextlib.closing(Ledger(here.folder / "books" / "bank.sqlite", read_only=True)) as book:
        assert sum(entry.row_releases for entry in book.sessions("others")) == COUNT
    here.start_anew()
    assert here.ask(strangers).sent == others.sent
    assert here.ask(people()).sent == first.sent


def test_ids_are_told_apart_whatever_letters_they_have(worlds):
    here, _ = worlds
    for ids in (("a\0b", "c"), ("a", "b\0c"), ("\ud800", "\udfff"), ("1 a", "1")):
        assert here.ask(people([0, 1], ids=ids)).charged == [2, 2]


@pytest.fixture(scope="module")
def nearly_exact() -> FederatedModel:
    """One whose answers are the true ones but once in 10^6: who was answered shows."""
    data = table()
    little = dict.fromkeys(("noise_multiplier", "mean_noise", "gram_noise"), 0.01)
    plan = plan_of(data, prediction_response_epsilon=16.0, **little)
    model = Federation(plan).fit(data).model
    assert model is not None
    return model


@pytest.mark.parametrize("folder", [True, False], ids=["on a disk", "in memory"])
@pytest.mark.parametrize("charged", [True, False], ids=["with ledgers", "without"])
def test_rows_without_ids_are_not_taken_for_others_at_their_place(nearly_exact, folder, charged, tmp_path):
    """Row 0 of one array is somebody else than row 0 of the next."""
    model = nearly_exact
    if folder:
        model = load(nearly_exact.save(tmp_path / "model"))
        nearly_exact._folder = None  # of other tests, too
    how: dict[str, Any] = {"ledger": tmp_path / "books"} if charged else {"uncharged": True}
    data = table()
    chosen = [np.flatnonzero(data.train_labels == label)[:20] for label in (0, 1)]
    found = [model.release([part[rows] for part in data.train_features], ReleaseOptions(**how)) for rows in chosen]
    assert not np.array_equal(found[0].scores_NK, found[1].scores_NK)
    exact = [
        model.release([part[rows] for part in data.train_features], ReleaseOptions(exact=True)).numbers
        for rows in chosen
    ]
    for one, other in zip(found, exact, strict=True):
        assert (one.numbers == other).mean() > 0.6


def test_rows_without_ids_are_charged_for_each_question_and_kept_nowhere(worlds):
    """Whether they are the same rows again could be told by their columns alone, which a ledger does not count."""
    here, there = worlds
    first = people(rows_are_named=False)
    for world, rows in ((here, people(rows_are_named=False)), (there, people(rows_are_named=False, moved=[3]))):
        assert world.ask(first).charged == [COUNT, COUNT]
        assert world.ask(rows).charged == [COUNT, COUNT]
    assert not list(here.folder.rglob("answers/*"))


def test_without_a_ledger_the_same_rows_without_ids_are_released_once(nearly_exact):
    data, sent = table(), []
    nearly_exact.taps = [lambda *seen: sent.append(seen) if seen[2][KIND] == EMBEDDING else None]
    rows = [part[:7] for part in data.test_features]
    first = nearly_exact.predict_proba(rows)
    assert np.array_equal(nearly_exact.predict_proba([part.copy() for part in rows]), first)
    assert len(sent) == 2
    nearly_exact.taps = []


def test_labels_beside_the_rows_make_no_second_release(summed):
    """Labels are the label holder's: they are compared with what was released, whatever they are. By a law whose sums
    no party can repeat."""
    here, _ = summed
    rows = people()
    here.ask(rows)
    labels = np.arange(COUNT) % 2
    found = here.model.release(dataclasses.replace(rows, labels=labels), ReleaseOptions())
    other = here.model.release(dataclasses.replace(rows, labels=1 - labels), ReleaseOptions())
    assert here.row_releases() == [COUNT, COUNT]
    right = float((found.numbers == labels).mean())
    assert found.metrics()["test_accuracy"] == pytest.approx(right)
    assert other.metrics()["test_accuracy"] == pytest.approx(1 - right)
    assert here.model.release(rows, ReleaseOptions()).true_labels is None


# --- in a run: predictions of test rows, and symbols of training rows ---


def interrupted(plan: Plan, first: VerticalDataset, second: VerticalDataset, folder: Path, kind: int) -> Iterator[Any]:
    """A run that is killed after its last round and goes on with other rows: what left, and what was charged."""
    for data, ends in ((first, False), (second, True)):
        federation, sent = Federation(plan), []
        federation.taps.append(
            lambda way, party, message, sent=sent: (
                sent.append((party, message[HEADER:]))
                if way == "up" and message[KIND] == EMBEDDING and message[ROUND_KIND] == kind
                else None
            )
        )

        def kill(done: int, *_: object) -> None:
            if done == len(plan.schedule):
                raise KeyboardInterrupt

        where = {"checkpoints": folder / "run", "ledger": folder / "books"}
        if ends:
            federation.fit(data, **where)
        else:
            with pytest.raises(KeyboardInterrupt):
                federation.fit(data, **where, on_round=kill)
        with contextlib.closing(Ledger(folder / "books" / "bank.sqlite", read_only=True)) as book:
            yield sent, book.sessions("people")[-1].row_releases


def named(data: VerticalDataset) -> VerticalDataset:
    train, test = (
        tuple(f"{letter}{row}" for row in range(count))
        for letter, count in (("p", data.num_samples), ("q", data.num_test_samples))
    )
    return dataclasses.replace(data, train_ids=train, test_ids=test)


def test_a_run_that_goes_on_answers_test_rows_as_before_whatever_changed(tmp_path):
    data = named(table())
    moved = np.array(data.test_features[0])
    moved[3:9] *= -40
    changed = dataclasses.replace(data, test_features=(moved, data.test_features[1]))
    plan = plan_of(data, evaluation="released")
    (first, _), (again, charged) = interrupted(plan, data, changed, tmp_path, PREDICTION)
    assert len(first) == 2
    assert again == first
    assert charged == 0


# --- keys ---


def keys_of(folder: Path, plan: Plan, data: VerticalDataset) -> list[list[bytes]]:
    """Every round's keys at the bank, of one store."""
    identities = [Identity.generate() for _ in PARTIES]
    setup = PartySetup(
        plan=plan,
        index=0,
        identity=identities[0].private_bytes(),
        identities=tuple(identity.public for identity in identities),
        train_features=data.train_features[0],
        test_features=data.test_features[0],
        answers=folder,
        dataset=data.name,
        train_ids=data.train_ids,
        test_ids=data.test_ids,
    )
    with contextlib.closing(setup.build()) as party:
        return [party._answers.keys(current) for current in plan.schedule]


@pytest.mark.parametrize("has_ids", [True, False])
def test_no_key_depends_on_a_column(has_ids, tmp_path):
    data = named(table()) if has_ids else table()
    plan = plan_of(data, evaluation="released")
    known = keys_of(tmp_path, plan, data)
    assert any(known)
    random = np.random.default_rng(2)
    for _ in range(3):
        other = dataclasses.replace(
            data,
            train_features=tuple(random.normal(size=part.shape).astype(np.float32) for part in data.train_features),
            test_features=tuple(random.normal(size=part.shape).astype(np.float32) for part in data.test_features),
        )
        assert keys_of(tmp_path, plan, other) == known
    elsewhere = keys_of(tmp_path, plan, dataclasses.replace(data, name="others"))
    assert not {key for keys in elsewhere for key in keys} & {key for keys in known for key in keys}


def earlier_key(secret: bytes, asked: dict[str, Any], row: int, columns: np.ndarray, weights: bytes) -> bytes:
    """As versions before data versions made a key: law and vote, split, weights, number, type and bytes of columns."""
    what = json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()
    shared = b"".join(len(part).to_bytes(8, "little") + part for part in (what, b"test", weights))
    digest = hashlib.blake2b(shared, digest_size=16, key=secret, person=b"answers' keys")
    digest.update(row.to_bytes(8, "little") + str(columns.dtype).encode().ljust(16) + columns.tobytes())
    return digest.digest()


def test_answers_that_an_earlier_version_kept_are_found_by_no_column(tmp_path):
    """Such a store is read as ever. Its answers are not looked for: found or not would tell of columns."""
    data = table()
    plan = plan_of(data, evaluation="released")
    asked = {"event": plan.mechanism_for(KINDS["prediction"]).event.to_dict(), "vote": plan.vote.to_dict()}
    encoder = build_encoder(plan, index=0, input_shape=(3,))
    state = preparation_for(plan, index=0, rows=torch.zeros(8, 3)).state()
    learned = hashlib.sha256(b"".join(name.encode() + state[name].numpy().tobytes() for name in sorted(state)))
    weights = hashlib.sha256(weights_digest(encoder).encode() + learned.digest()).digest()
    store = StoredAnswers(tmp_path)
    kept = [earlier_key(store._secret, asked, row, own, weights) for row, own in enumerate(data.test_features[0])]
    store.put(kept, np.ones((len(kept), 1), dtype=np.uint8))
    store.close()
    assert not set(kept) & {key for keys in keys_of(tmp_path, plan, data) for key in keys}
    assert len(StoredAnswers(tmp_path)) == len(kept)


def test_a_store_has_no_name_and_no_column_in_it(worlds):
    here, _ = worlds
    here.ask(people(ids=tuple(f"a-name-to-find-{row}" for row in ALL)))
    stores = list((here.folder / "model").rglob("answers/answers"))
    assert len(stores) == 2
    for store in stores:
        content = store.read_bytes()
        assert b"a-name-to-find" not in content
        assert b"people" not in content
        for part in people().features:
            assert not any(row.tobytes() in content for row in part)

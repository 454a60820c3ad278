"""VerticalClassifier: scikit-learn's own checks, and what it costs to use it as scikit-learn does."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import pbmvfl
from pbmvfl import Ledger, Limit, ReleaseOptions, VerticalClassifier
from pbmvfl.errors import BudgetExceeded, DataError, ModelError, PlanError
from support.label_draws import LEDGER as LABEL_LEDGER
from support.label_draws import charged

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "estimator.md"
COLUMNS = {"bank": ["age", "job"], "shop": ["visits", "spent"]}
SCHEMA = {
    "columns": {
        "age": {"range": [0, 100]},
        "job": {"vocabulary": ["cook", "nurse"], "missing": True},
        "visits": {"range": [0, 20]},
        "spent": {"range": [0, 300]},
    }
}
#: Checks of scikit-learn that cannot pass, and why; docs/how-to/estimator.md lists the same.
EXPECTED = {
    "check_estimators_pickle": "the parts of a model belong to different owners; it is saved, not pickled",
    "check_fit_idempotent": "a second fit draws new noise",
    "check_classifier_data_not_an_array": "compares two fits, which have different noise",
    "check_supervised_y_2d": "compares two fits, which have different noise",
}


def people(rows: int = 120, first: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Rows whose age says nearly everything about their label, and whose index names them."""
    known = np.random.default_rng(5)
    frame = pd.DataFrame(
        {
            "age": known.integers(0, 100, rows),
            "job": known.choice(["cook", "nurse"], rows),
            "visits": known.poisson(3, rows),
            "spent": known.normal(150, 40, rows),
            "unused": known.normal(size=rows),
        },
        index=[f"p{first + row}" for row in range(rows)],
    )
    return frame, np.where(frame["age"] > 50, "old", "young")


def classifier(**settings) -> VerticalClassifier:
    return VerticalClassifier(**{"columns": COLUMNS, "schema": SCHEMA, **settings})


@pytest.fixture(autouse=True)
def _few_rows_are_fine():
    """Few rows are quick, and what they leave to learn is said in a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*this much noise")
        yield


@pytest.fixture(scope="module")
def fitted() -> VerticalClassifier:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return classifier().fit(*people())


# --- scikit-learn's checks ---


@pytest.mark.filterwarnings("ignore")  # the checks raise warnings of their own
@parametrize_with_checks([VerticalClassifier()], expected_failed_checks=lambda _: EXPECTED)
def test_scikit_learn_s_checks_pass(estimator, check):
    check(estimator)


def test_what_checks_of_two_fits_would_compare_is_taken():
    """Lists for arrays, and labels as a column, with scikit-learn's warning."""
    rows, labels = np.random.default_rng(1).normal(size=(40, 4)), np.arange(40) % 2
    found = VerticalClassifier(exact=True).fit(rows.tolist(), labels.tolist())
    assert np.array_equal(found.predict_proba(rows.tolist()), found.predict_proba(rows))
    with pytest.warns(DataConversionWarning, match="column-vector"):
        column = VerticalClassifier().fit(rows, labels[:, None])
    assert column.predict(rows).shape == (40,)


def test_the_page_lists_every_exception():
    listed = re.findall(r"^\| `(check_\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(EXPECTED)


# --- what it learns, and of what type ---


def test_it_learns_what_the_columns_say():
    """75 fits were right in 99.2% of 200 rows on average, with a deviation of 0.6 points, 96.5% at the least: the bound
    is 25 deviations away."""
    frame, labels = people(1000)
    assert classifier().fit(frame[:800], labels[:800]).score(frame[800:], labels[800:]) > 0.85


@pytest.mark.parametrize(
    "classes",
    [("no", "yes"), (3, 7), (-1, 1), (False, True), (0.0, 1.0), ("a", "b", "c")],
    ids=["words", "numbers", "signs", "bools", "floats", "three"],
)
def test_predictions_have_the_labels_type(classes):
    rows = np.random.default_rng(1).normal(size=(60, 4))
    labels = np.array(classes)[np.arange(60) % len(classes)]
    found = VerticalClassifier().fit(rows, labels)
    assert found.classes_.dtype == labels.dtype
    assert found.classes_.tolist() == sorted(classes)
    assert found.predict(rows).dtype == labels.dtype
    shares = found.predict_proba(rows)
    assert shares.shape == (60, len(classes))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert np.array_equal(found.predict(rows), found.classes_[shares.argmax(axis=1)])


def test_labels_may_be_a_series_of_a_pandas_type():
    frame, labels = people(60)
    for kind in ("category", "string", "object"):
        found = classifier().fit(frame, pd.Series(labels, index=frame.index, dtype=kind))
        assert set(found.predict(frame)) <= {"old", "young"}


def test_every_party_has_its_own_columns_and_others_are_not_read(fitted):
    frame, _ = people()
    assert [(part.party, part.names) for part in fitted.model_.columns] == [
        ("bank", ("age", "job")),
        ("shop", ("visits", "spent")),
    ]
    assert fitted.feature_names_in_.tolist() == list(frame.columns)
    assert fitted.n_features_in_ == 5
    exact = clone(fitted).set_params(exact=True).fit(*people())
    changed = frame.assign(unused=-frame["unused"])
    assert np.array_equal(exact.predict_proba(frame), exact.predict_proba(changed))
    older = frame.assign(age=100 - frame["age"])
    assert not np.array_equal(exact.predict_proba(frame), exact.predict_proba(older))


def test_columns_are_named_or_numbered_and_may_be_an_index():
    frame, labels = people(60)
    ways = [
        {"bank": [0, 1], "shop": [2, 3]},
        {"bank": ["age", 1], "shop": np.array([2, 3])},
        {"bank": frame.columns[:2], "shop": frame.columns[2:4]},
        "bank=age,job;shop=visits,spent",
    ]
    for columns in ways:
        found = classifier(columns=columns).fit(frame, labels).model_.columns
        assert [part.names for part in found] == [("age", "job"), ("visits", "spent")]


def test_arrays_are_cut_into_blocks_or_as_they_are_numbered():
    rows = np.random.default_rng(1).normal(size=(40, 5))
    labels = np.arange(40) % 2
    blocks = VerticalClassifier(num_parties=3).fit(rows, labels)
    assert blocks.model_.party_names == ("party-0", "party-1", "party-2")
    chosen = VerticalClassifier(columns={"a": [4], "b": [0, 2]}, exact=True).fit(rows, labels)
    unread = rows.copy()
    unread[:, [1, 3]] = 9
    assert np.array_equal(chosen.predict_proba(rows), chosen.predict_proba(unread))
    with pytest.raises(NotFittedError):
        VerticalClassifier().predict(rows)


def test_a_schema_serves_arrays_too_and_its_slots_for_missing_values():
    rows = np.random.default_rng(1).uniform(0, 9, size=(40, 2))
    rows[3, 1] = np.nan
    schema = {"columns": {"0": {"range": [0, 9]}, "1": {"range": [0, 9], "missing": True}}}
    found = VerticalClassifier(schema=schema).fit(rows, np.arange(40) % 2)
    assert [part.width for part in found.model_.columns] == [1, 2]
    assert len(found.predict(rows)) == 40
    with pytest.raises(ValueError, match="NaN"):
        VerticalClassifier().fit(rows, np.arange(40) % 2)


def test_tables_of_pyarrow_are_frames(fitted):
    frame, labels = people()
    found = classifier().fit(pa.table(dict(frame.items())), labels)
    assert found.feature_names_in_.tolist() == list(frame.columns)
    assert found.model_.columns == fitted.model_.columns


# --- what it costs ---


@pytest.mark.parametrize("unit", ["cell", "record"])
def test_training_and_a_prediction_are_within_their_budgets(unit):
    found = classifier(unit=unit, epsilon=4, prediction_epsilon=2.5).fit(*people())
    assert 3.9 < found.privacy_.epsilon(unit, "strict") <= 4
    assert 2 < found.prediction_privacy_.epsilon(unit, "strict") <= 2.5
    assert {bound.delta for bound in found.privacy_.of_columns} == {1e-5}


def books(folder: Path) -> list[Path]:
    """Of the parties."""
    return [path for path in sorted(folder.glob("*.sqlite")) if path.name != LABEL_LEDGER]


def uses(book: Path) -> tuple[Counter[str], Counter[str], int]:
    """(trainings of each row, predictions of each row, sessions), from the sessions' own lists of rows."""
    trained: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    with contextlib.closing(Ledger(book, read_only=True)) as ledger:
        sessions = ledger.sessions("frame")
        for entry in sessions:
            counts = entry.terms.schedule.total_uses(entry.first_round, entry.charged_until)
            kinds = {kind.name for kind, count in counts.items() if count}
            trained.update(ledger.read_ids(entry.train_ids) if "local" in kinds else ())
            predicted.update(ledger.read_ids(entry.test_ids) if "prediction" in kinds else ())
    return trained, predicted, len(sessions)


def test_three_folds_charge_every_row_two_trainings_and_one_prediction(tmp_path):
    frame, labels = people()
    shuffled = frame.sample(frac=1, random_state=3)
    labels = labels[frame.index.get_indexer(shuffled.index)]
    scores = cross_val_score(classifier(ledger=tmp_path / "books"), shuffled, labels, cv=3, error_score="raise")
    assert len(scores) == 3
    assert [book.name for book in books(tmp_path / "books")] == ["bank.sqlite", "shop.sqlite"]
    for book in books(tmp_path / "books"):
        trained, predicted, sessions = uses(book)
        assert trained == dict.fromkeys(frame.index, 2)
        assert predicted == dict.fromkeys(frame.index, 1)
        assert sessions == 6
    # Every row is in two folds of training, and its label was drawn once.
    assert {name: count for (name, *_), count in charged(tmp_path / "books").items()} == dict.fromkeys(frame.index, 1)


@pytest.mark.slow
def test_scores_of_training_rows_and_a_search_are_charged_as_often_as_they_ask(tmp_path):
    frame, labels = people(60)
    cross_validate(
        classifier(ledger=tmp_path / "a"),
        frame,
        labels,
        cv=3,
        scoring=["accuracy", "roc_auc"],
        return_train_score=True,
        error_score="raise",
    )
    trained, predicted, _ = uses(tmp_path / "a" / "bank.sqlite")
    assert trained == dict.fromkeys(frame.index, 2)
    assert predicted == dict.fromkeys(frame.index, 3)  # both scores come from one release
    search = GridSearchCV(classifier(ledger=tmp_path / "b"), {"epsilon": [2.0, 8.0]}, cv=2, error_score="raise")
    search.fit(frame, labels)
    trained, predicted, _ = uses(tmp_path / "b" / "shop.sqlite")
    assert trained == dict.fromkeys(frame.index, 2 * 1 + 1)  # of each candidate a fold, and the best one again
    assert predicted == dict.fromkeys(frame.index, 2)


@pytest.mark.parametrize(
    ("given", "epsilon"), [({}, 4.0), ({"label_epsilon": 2.0}, 2.0), ({"label_epsilon": None}, float("inf"))]
)
def test_labels_have_the_epsilon_that_was_given(given, epsilon):
    rows, labels = people(200)
    found = classifier(**given).fit(rows, labels)
    assert found.privacy_.label.epsilon == pytest.approx(epsilon, rel=1e-6)


def test_a_grid_search_tries_both_algorithms_and_their_budgets():
    rows, labels = people(200)
    grid = {"algorithm": ["staged", "pbm"], "epsilon": [4.0, 16.0]}
    searched = GridSearchCV(classifier(exact=True), grid, cv=2, error_score="raise").fit(rows, labels)
    tried = {(each["algorithm"], each["epsilon"]) for each in searched.cv_results_["params"]}
    assert tried == {(algorithm, epsilon) for algorithm in grid["algorithm"] for epsilon in grid["epsilon"]}
    best = searched.best_estimator_
    assert best.model_.plan.algorithm == searched.best_params_["algorithm"]
    # Age alone decides, and a party that trains alone sees it; 200 rows of joint rounds under 4 or 16 learn little.
    assert searched.best_params_["algorithm"] == "staged"
    assert searched.best_score_ > 0.75


def test_pbm_trains_joint_rounds_within_its_budget_and_predicts_by_their_release(tmp_path):
    rows, labels = people()
    found = classifier(algorithm="pbm", epsilon=8, ledger=tmp_path / "books").fit(rows, labels)
    plan = found.model_.plan
    assert (plan.algorithm, plan.mechanism, plan.secure_aggregation) == ("pbm", "pbm", True)
    assert found.privacy_.epsilon("cell", "strict") <= 8
    assert found.prediction_privacy_.epsilon("cell", "strict") <= found.prediction_epsilon
    assert set(found.predict(rows[:7])) <= {"old", "young"}
    with contextlib.closing(Ledger(tmp_path / "books" / "bank.sqlite", read_only=True)) as book:
        sessions = [entry.row_releases for entry in book.sessions("frame")]
    assert sessions == [plan.num_epochs * len(rows), 7]


def test_a_budget_below_what_pbm_releases_of_a_row_is_refused_before_training(tmp_path):
    with pytest.raises(PlanError, match=r"prediction_epsilon=0.001 with algorithm=pbm.*which costs"):
        classifier(algorithm="pbm", prediction_epsilon=0.001, ledger=tmp_path / "books").fit(*people())
    assert not (tmp_path / "books").exists()


def test_the_same_rows_again_cost_nothing_and_other_rows_do(tmp_path):
    frame, labels = people()
    found = classifier(ledger=tmp_path).fit(frame, labels)
    answers = found.predict(frame)
    found.predict_proba(frame)
    found.score(frame, labels)
    assert np.array_equal(answers, found.predict(frame))
    assert uses(tmp_path / "bank.sqlite")[2] == 2
    found.predict(frame[:10])
    assert uses(tmp_path / "bank.sqlite")[2] == 3
    found.fit(frame, labels)
    assert uses(tmp_path / "bank.sqlite")[0] == dict.fromkeys(frame.index, 2)


def test_exact_predictions_are_charged_to_nobody_and_are_the_same_each_time(tmp_path):
    frame, labels = people()
    found = classifier(ledger=tmp_path, exact=True).fit(frame, labels)
    first = found.predict_proba(frame)
    # Sums of floats in another order differ in their last digits.
    assert np.allclose(found.predict_proba(frame[5:])[:20], first[5:25], rtol=1e-3, atol=1e-6)
    assert not uses(tmp_path / "bank.sqlite")[1]


def test_a_ledger_wants_rows_with_names_and_writes_nothing_for_others(tmp_path):
    frame, labels = people(40)
    twice = frame.set_axis([f"p{row // 2}" for row in range(40)])
    alike = frame.set_axis([1, "1", *range(2, 40)])
    absent = frame.set_axis([None, *range(1, 40)])
    for rows in (twice, alike, absent, pa.table(dict(frame.items()))):
        with pytest.raises(DataError, match="ledgers know rows by their names"):
            classifier(ledger=tmp_path / "books").fit(rows, labels)
    with pytest.raises(DataError, match="ledgers know rows by their names"):
        VerticalClassifier(ledger=tmp_path / "books").fit(np.zeros((40, 4)), np.arange(40) % 2)
    assert not (tmp_path / "books").exists()
    found = classifier(ledger=tmp_path / "books").fit(frame, labels)
    with pytest.raises(DataError, match="ledgers know rows by their names"):
        found.predict(twice)
    assert not uses(tmp_path / "books" / "bank.sqlite")[1]


def test_a_whole_number_names_the_same_row_whatever_its_type(tmp_path):
    frame, labels = people(40)
    classifier(ledger=tmp_path).fit(frame.set_axis(range(40)), labels)
    classifier(ledger=tmp_path).fit(frame.set_axis(np.arange(40.0)), labels)
    assert uses(tmp_path / "bank.sqlite")[0] == {str(row): 2 for row in range(40)}


def test_limits_hold(tmp_path):
    frame, labels = people()
    (tmp_path / "books").mkdir()
    Ledger(tmp_path / "books" / "shop.sqlite", owner="shop").close()
    with contextlib.closing(Ledger(tmp_path / "books" / "bank.sqlite", owner="bank")) as book:
        book.set_limit("frame", Limit.choose(unit="cell", accounting="strict", epsilon=12, delta=1e-5))
    found = classifier(ledger=tmp_path / "books", prediction_epsilon=0.5)
    found.fit(frame, labels)
    assert found.result_.metrics == {}  # nobody looked at anything exactly
    found.predict(frame)
    with pytest.raises(BudgetExceeded, match="Nothing was sent"):
        clone(found).fit(frame, labels)
    trained, predicted, _ = uses(tmp_path / "books" / "bank.sqlite")
    assert set(trained.values()) == set(predicted.values()) == {1}


def test_no_seed_makes_noise_come_again():
    """Two fits with one seed have other weights; equal ones have a chance far below 1e-9."""
    first, second = (classifier(exact=True).fit(*people()).predict_proba(people()[0]) for _ in range(2))
    assert not np.allclose(first, second, atol=1e-6)


def test_noise_that_leaves_nothing_to_learn_is_said_before_training():
    with pytest.warns(UserWarning, match=r"VerticalClassifier: this much noise on 20 rows .* leaves nothing"):
        classifier(epsilon=0.1).fit(*people(20))


# --- settings, copies and files ---


def test_a_fitted_one_is_saved_and_neither_pickled_nor_copied(fitted, tmp_path):
    for way in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(ModelError, match=r"estimator\.model_\.save\(folder\)"):
            way(fitted)
    with pytest.raises(ModelError, match=r"estimator\.model_\.save\(folder\)"):
        pickle.dumps(make_pipeline(fitted))
    frame, _ = people()
    exact = pbmvfl.load(fitted.model_.save(tmp_path / "model")).release(frame, ReleaseOptions(exact=True)).probabilities
    assert np.array_equal(exact, fitted.model_.release(frame, ReleaseOptions(exact=True)).probabilities)
    assert pickle.loads(pickle.dumps(classifier(epsilon=3))).get_params() == classifier(epsilon=3).get_params()


def test_a_clone_has_the_settings_and_no_model(fitted):
    twin = clone(fitted)
    assert twin.get_params() == fitted.get_params()
    assert not hasattr(twin, "model_")
    assert not hasattr(twin, "classes_")


def test_settings_of_predictions_that_were_changed_after_fit_are_refused(fitted, tmp_path):
    frame, _ = people()
    changes = {"prediction_epsilon": 1.0, "unit": "record", "delta": 1e-9, "ledger": tmp_path, "dataset": "others"}
    for name, value in changes.items():
        before = getattr(fitted, name)
        fitted.set_params(**{name: value})
        try:
            with pytest.raises(PlanError, match=f"{name}=.* in fit"):
                fitted.predict(frame)
        finally:
            fitted.set_params(**{name: before})
    assert len(fitted.predict(frame)) == len(frame)


def test_a_fit_that_fails_leaves_no_model_behind():
    frame, labels = people(60)
    found = classifier().fit(frame, labels)
    with pytest.raises(PlanError):
        found.set_params(epsilon=-1).fit(frame, labels)
    with pytest.raises(NotFittedError):
        found.predict(frame)


def test_a_pipeline_keeps_names_if_its_steps_do(tmp_path):
    frame, labels = people()
    numbers = frame[["age", "visits", "spent"]]
    columns = {"bank": ["age"], "shop": ["visits", "spent"]}
    with pytest.raises(DataError, match="set_output"):
        make_pipeline(StandardScaler(), VerticalClassifier(columns)).fit(numbers, labels)
    steps = make_pipeline(StandardScaler(), VerticalClassifier(columns, ledger=tmp_path))
    steps.set_output(transform="pandas").fit(numbers, labels).predict(numbers)
    assert steps[-1].feature_names_in_.tolist() == ["age", "visits", "spent"]
    assert uses(tmp_path / "shop.sqlite")[1] == dict.fromkeys(frame.index, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilon": 0}, "epsilon=0 "),
        ({"epsilon": "8"}, "epsilon='8'"),
        ({"prediction_epsilon": -1}, "prediction_epsilon=-1"),
        ({"prediction_epsilon": None}, "prediction_epsilon=None"),
        ({"prediction_epsilon": float("inf")}, "prediction_epsilon=inf"),
        ({"delta": 1}, "delta=1"),
        ({"unit": "party"}, "unit='party' is not permitted"),
        ({"seed": None}, "seed=None"),
        ({"exact": "no"}, "exact='no' must be True or False"),
        ({"dataset": "a/b"}, "dataset='a/b' is not permitted"),
        ({"dataset": None}, "dataset=None is not permitted"),
        ({"columns": None, "num_parties": 1}, "num_parties=1"),
        ({"columns": None, "num_parties": 9}, "n_features=5 cannot be shared by num_parties=9"),
        ({"columns": ["age"]}, "must be of the form"),
        ({"columns": {"bank": ["age"]}}, "columns name 1 party, and"),
        ({"columns": {"bank": ["age"], "shop": []}}, "party='shop': columns=\\[\\]"),
        ({"columns": {"bank": 1, "shop": [2]}}, "party='bank': columns=1"),
        ({"columns": {"bank": ["age"], "shop": "visits"}}, "party='shop': columns='visits'"),
        ({"columns": {"bank": ["age"], "shop": [True]}}, "column=True must be"),
        ({"columns": {"bank": ["aeg"], "shop": [5]}}, "(?s)did you mean 'age'.*column=5 is not there"),
        ({"columns": {"bank": ["age"], "shop": [0]}}, "column=0 is named twice \\(party='bank' and party='shop'\\)"),
        ({"schema": {"columns": {"aeg": {"range": [0, 1]}}}}, "did you mean 'age'"),
        ({"schema": None}, "column='job' holds words"),
    ],
)
def test_a_setting_that_cannot_be_is_named_in_fit_and_not_before(settings, words):
    found = classifier(**settings)
    with pytest.raises(ValueError, match=words) as error:
        found.fit(*people(40))
    assert isinstance(error.value, DataError | PlanError)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a"] * 40, "at least 2 classes"),
        ([None] + ["a", "b", "c"] * 13, "y: row=0 "),
        ([float("nan")] + ["a", "b", "c"] * 13, "y: row=0 "),
        (pd.array([pd.NA] + ["a", "b", "c"] * 13, dtype="string"), "y: row=0 "),
        (pd.Series([1] + ["a", "b", "c"] * 13, dtype=object), "words and other values"),
        (["a", "a "] * 20, "differ by blanks"),
        (np.linspace(0, 1, 40), "Unknown label type: continuous: 40 different numbers.*numpy.digitize.*regressor"),
        (np.arange(100) % 26, "26 classes in 100 rows; permitted are at most 25 .a quarter.*numpy.digitize.*regressor"),
        ((np.arange(100) % 26).astype(float), "26 classes in 100 rows"),
        ([f"person-{row % 26}" for row in range(100)], "26 classes in 100 rows.*identifier"),
    ],
    ids=["one", "none", "nan", "na", "mixed", "blanks", "amounts", "counts", "whole-floats", "names"],
)
def test_labels_that_cannot_be_are_named(labels, words):
    with pytest.raises(ValueError, match=words):
        classifier().fit(people(len(labels))[0], labels)


def test_a_quarter_of_the_rows_may_be_classes_and_whole_floats_are_labels():
    rows, _ = people(100)
    found = classifier(epsilon=64).fit(rows, (np.arange(100) % 25).astype(float))
    assert found.classes_.tolist() == list(range(25))


def test_no_error_has_a_value_of_a_column_in_it(fitted):
    secret = "rosebud"
    words = np.full((40, 4), "1", dtype=object)
    words[7, 2] = secret
    mixed = np.full((40, 4), 1, dtype=object)
    mixed[7, 2] = secret
    frame, _ = people(40)
    objects = np.array(frame, dtype=object)
    objects[7, 1] = secret
    labels = np.arange(40) % 2
    asked = [
        lambda: VerticalClassifier().fit(words, labels),
        lambda: VerticalClassifier().fit(words.astype(str), labels),
        lambda: VerticalClassifier(schema={"columns": {"2": {"range": [0, 1]}}}).fit(mixed, labels),
        lambda: classifier().fit(frame.assign(job=[secret] * 40), labels),
        lambda: classifier().fit(frame.assign(age=[secret] * 40), labels),
        lambda: fitted.predict(frame.assign(job=[secret] * 40)),
        lambda: fitted.predict(objects),
    ]
    for ask in asked:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an array has no names
            with pytest.raises(ValueError) as error:
                ask()
        chain = [error.value, error.value.__cause__]
        chain += [] if error.value.__suppress_context__ else [error.value.__context__]
        assert not any(secret in str(each) for each in chain)
    assert secret not in repr(fitted)

"""Fusion models: the label holder's model of classes, given what parties released about the fusion rows.

Every fusion row releases its private embedding once, by the mechanism that predictions use; the label holder knows the
row's true label. Whatever is learned from the two is post-processing, and so are the choice of a model and of its
settings, which held-out fusion rows decide by log loss:

    sum        naive Bayes: a table of symbols for each party and class, or the class scores that symbols stand for, or
               normal laws of the sums' coordinates
    logistic   logistic regression on indicators of symbols, on what the tables say of them and on the sum of the scores
               that they stand for; or on sums
    boosted    boosted trees on the symbols and on what the tables say of them, or on sums

A model that is less accurate than the majority class on held-out rows is not used; classes are then predicted by their
shares of the fusion rows. Predictions release embeddings of the same law, so noise is learned as it is.

Shape suffixes: F fusion rows, B rows, M parties, W coordinates of a sum, V either of the two, K classes, S symbols.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import one_of
from pbmvfl.errors import ModelError, PlanError
from pbmvfl.plan.groups import FusionName

if TYPE_CHECKING:
    from torch import Tensor

_Values = npt.NDArray[Any]
_Reals = npt.NDArray[np.float64]

#: Models that are tried, in the order by which a state names one, with a number: of sums, how far the scores that
#: symbols stand for are believed, 0 for tables; of logistic regression, its inverse strength, of which a thousandth
#: leaves little but the classes' shares. The last is an own classifier, which takes the others' place.
_SUM = tuple((FusionName.SUM, believed) for believed in (0.0, 0.4, 0.7, 1.0))
_LOGISTIC = tuple((FusionName.LOGISTIC, strength) for strength in (0.001, 0.01, 0.1, 1.0))
_CANDIDATES = (*_SUM, *_LOGISTIC, (FusionName.BOOSTED, 0.0), (FusionName.AUTO, 0.0))
#: Up to so many rows are cross-validated in so many folds; of more, one fold is held out, of at most so many rows.
_FEW_ROWS, _FOLDS, _MOST_HELD_OUT = 4000, 4, 20_000
#: From fewer rows for each class, five leaves of 20, trees learn nothing that logistic regression does not know.
_ROWS_OF_TREES = 100
#: A table's row for a class begins with so many rows that have symbols as often as all classes together.
_PRIOR_ROWS = 4
#: Standardised coordinates of sums are clipped to this: noise has long tails, and no honest sum is far beyond them.
_FARTHEST = 8.0
_FIGURES = ("accuracy", "log_loss", "majority")


@dataclass(frozen=True, eq=False)
class FusionModel:
    """Classes of rows from what parties released of them. Made by `fit_fusion` or `from_state`."""

    _rows: _Rows
    #: Place of the model in `_CANDIDATES`; -1 where classes are predicted by their shares alone.
    _place: int
    #: `accuracy` and `log_loss` of the model, and the `majority` class's accuracy, on held-out fusion rows.
    held_out: dict[str, float]
    _predict: Callable[[_Values], _Reals]

    @property
    def name(self) -> FusionName:
        """Return the chosen model: `auto` for an own classifier, `sum` where classes' shares are all there is."""
        return _CANDIDATES[max(0, self._place)][0]

    @property
    def majority(self) -> float:
        """Accuracy of the majority class on the held-out fusion rows."""
        return self.held_out["majority"]

    @property
    def beats_majority(self) -> bool:
        """Return whether a model is used at all: one that is not below the majority class on held-out rows."""
        return self._place >= 0

    @property
    def description(self) -> str:
        """Return what the model is and how it did on held-out fusion rows, for reports."""
        rows = f"{len(self._rows.labels):,} fusion rows"
        if self.beats_majority:
            own = f"own classifier {type(self._rows.estimator).__name__}"
            kinds = {FusionName.SUM: "naive Bayes", FusionName.LOGISTIC: "logistic regression", FusionName.AUTO: own}
            said = f"{kinds.get(self.name, 'boosted trees')} on what parties released of {rows}; right on "
            said += f"{self.held_out['accuracy']:.1%} of held-out ones"
        else:
            said = (
                f"the classes' shares of {rows} alone: no model was as accurate as the majority class on held-out ones"
            )
        return f"{said} (majority class: {self.majority:.1%})"

    def log_probabilities(self, values_BV: _Values) -> npt.NDArray[np.float32]:
        """Return ln P(class | released values), (B, K).

        Args:
            values_BV: Symbols of every party, (B, M), or sums, (B, W), as in `fit_fusion`. A symbol out of range or a
                number that is not finite, which no honest party sends, says nothing about the class.
        """
        return np.log(self._predict(self._rows.read(values_BV))).astype(np.float32)

    def state(self) -> dict[str, Tensor]:
        """Return the fusion rows' released values and labels, the place of the choice, and its held-out figures.

        The model is learned again from these: nothing that is loaded is code, and no format of trees is stored.
        """
        import torch

        return {
            "fusion.values": torch.from_numpy(self._rows.values.copy()),
            "fusion.labels": torch.from_numpy(self._rows.labels.copy()),
            "fusion.choice": torch.tensor([self._place]),
            "fusion.figures": torch.tensor([self.held_out[name] for name in _FIGURES], dtype=torch.float64),
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Tensor],
        *,
        num_classes: int,
        num_symbols: int | None,
        scores_SK: _Reals | None = None,
        estimator: Any = None,
    ) -> FusionModel:
        """Return the model of a state, learned again from its rows without a new choice.

        Args:
            state: As `state()` returns it; other entries are left alone.
            num_classes: As in `fit_fusion`.
            num_symbols: As in `fit_fusion`.
            scores_SK: As in `fit_fusion`.
            estimator: The own classifier, if the model was fitted with one.

        Raises:
            ModelError: The state is not one of a fusion model of these sizes.
        """
        try:
            values, labels, places, figures = (
                state[f"fusion.{name}"].numpy() for name in ("values", "labels", "choice", "figures")
            )
            rows = _Rows(values, labels, num_classes, num_symbols, estimator, scores_SK)
            (place,), held_out = places.tolist(), dict(zip(_FIGURES, figures.tolist(), strict=True))
            candidate = _CANDIDATES[place] if place >= 0 else None
        except (KeyError, IndexError, ValueError) as error:
            raise ModelError(f"the state of the fusion model cannot be used: {error}; train again") from error
        if (candidate is not None and candidate[0] is FusionName.AUTO) != (estimator is not None):
            raise ModelError(
                f"the state of the fusion model has choice={place}, with estimator={estimator!r}: give the own "
                "classifier that it was fitted with, or none if there was none"
            )
        return cls(rows, place, held_out, rows.learn(candidate))


def fit_fusion(
    values_FV: _Values,
    labels_F: _Values,
    *,
    num_classes: int,
    num_symbols: int | None,
    scores_SK: _Reals | None = None,
    choice: FusionName | str = FusionName.AUTO,
    estimator: Any = None,
) -> FusionModel:
    """Choose and learn a fusion model from released embeddings of the fusion rows and their true labels.

    Args:
        values_FV: With `num_symbols`: integers (F, M), one symbol of each party. Without: decoded sums, floats (F, W).
        labels_F: Classes of these rows, 0..K-1.
        num_classes: K.
        num_symbols: S, or None for sums.
        scores_SK: The class scores that each symbol stands for by the public vote, (S, K), if it does for any.
        choice: The model, or `auto` for the one with the least log loss on held-out fusion rows.
        estimator: An own scikit-learn classifier with `predict_proba`, in place of the choice. It is cloned, and fitted
            to the values as they are; a symbol out of range is S to it.

    Raises:
        PlanError: Values, labels, the choice or the classifier are not of this form.
    """
    choice = one_of("fusion", choice, FusionName)
    if estimator is not None and not callable(getattr(estimator, "predict_proba", None)):
        raise PlanError(f"fusion={estimator!r} has no predict_proba; give a scikit-learn classifier that has one")
    rows = _Rows(values_FV, labels_F, num_classes, num_symbols, estimator, scores_SK)

    def is_tried(name: FusionName, number: float) -> bool:
        if name is FusionName.SUM and number and scores_SK is None:
            return False
        if estimator is not None or choice is not FusionName.AUTO:
            return name is (choice if estimator is None else FusionName.AUTO)
        few = len(rows.labels) < _ROWS_OF_TREES * num_classes
        return name is not FusionName.AUTO and not (few and name is FusionName.BOOSTED)

    places = [place for place, (name, number) in enumerate(_CANDIDATES) if is_tried(name, number)]
    majority, accuracies, losses = rows.held_out([_CANDIDATES[place] for place in places])
    good = [(loss, accuracy, place) for loss, accuracy, place in zip(losses, accuracies, places, strict=True)]
    good = [each for each in good if each[1] >= majority]
    loss, accuracy, place = min(good, default=(math.inf, majority, -1))
    held_out = dict(zip(_FIGURES, (accuracy, loss, majority), strict=True))
    return FusionModel(rows, place, held_out, rows.learn(_CANDIDATES[place] if place >= 0 else None))


class _Rows:
    """Fusion rows, whose models are learned and tried."""

    def __init__(
        self,
        values: _Values,
        labels: _Values,
        classes: int,
        symbols: int | None,
        estimator: Any,
        scores_SK: _Reals | None,
    ) -> None:
        values, labels = np.asarray(values), np.asarray(labels)
        if values.ndim != 2 or labels.shape != values.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
            raise PlanError(
                f"fusion rows have values of shape={values.shape} and labels of shape={labels.shape}, {labels.dtype}; "
                "give (F, V) and F whole numbers"
            )
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise PlanError(f"labels={labels.min()} to {labels.max()} of fusion rows; permitted: 0 to {classes - 1}")
        self.classes, self.symbols, self.estimator, self.scores_SK = classes, symbols, estimator, scores_SK
        self.values, self.labels = self.read(values), labels.astype(np.int64)

    def read(self, values: _Values) -> _Values:
        """Return symbols, S for whatever is none; or sums, 0 for whatever is no number."""
        values = np.asarray(values)
        if self.symbols is None:
            return np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        fits = (values >= 0) & (values < self.symbols)
        return np.where(fits, values, self.symbols).astype(np.int16)

    def held_out(self, candidates: list[tuple[FusionName, float]]) -> tuple[float, list[float], list[float]]:
        """Return the majority class's accuracy, and every candidate's accuracy and log loss, on rows held out."""
        fold_F = np.empty(len(self.labels), dtype=np.int64)
        fold_F[np.argsort(self.labels, kind="stable")] = np.arange(len(fold_F)) % _FOLDS  # classes in equal shares
        right, losses, by_majority, count = np.zeros(len(candidates)), np.zeros(len(candidates)), 0, 0
        for fold in range(_FOLDS if len(fold_F) <= _FEW_ROWS else 1):
            asked = np.flatnonzero(fold_F == fold)[:_MOST_HELD_OUT]
            learned = np.flatnonzero(fold_F != fold)[:_MOST_HELD_OUT]
            if not len(asked) or not len(learned):
                continue
            own, true = self.values[learned], self.labels[learned]
            some = _Rows(own, true, self.classes, self.symbols, self.estimator, self.scores_SK)
            count += len(asked)
            by_majority += int((self.labels[asked] == np.bincount(true).argmax()).sum())
            for index, candidate in enumerate(candidates):
                shares = some.learn(candidate)(self.values[asked])
                right[index] += (shares.argmax(axis=1) == self.labels[asked]).sum()
                losses[index] -= np.log(shares[np.arange(len(asked)), self.labels[asked]]).sum()
        count = max(1, count)
        return by_majority / count, (right / count).tolist(), (losses / count).tolist()

    def learn(self, candidate: tuple[FusionName, float] | None) -> Callable[[_Values], _Reals]:
        """Return a candidate's map of values to probabilities, (B, K); for None, the classes' shares.

        One row's worth of the shares is mixed in, so that no class has probability 0.
        """
        rows_K = np.bincount(self.labels, minlength=self.classes) + 0.5
        prior_K, weight = rows_K / rows_K.sum(), len(self.labels) / (len(self.labels) + 1)
        if candidate is None or len(np.unique(self.labels)) < 2:
            return lambda asked: np.broadcast_to(prior_K, (len(asked), self.classes))
        reader = _Sums(self) if self.symbols is None else _Tables(self)
        if candidate[0] is not FusionName.SUM:
            inner = _classifier(self, reader, *candidate)
            return lambda asked: weight * inner(asked) + (1 - weight) * prior_K
        believed = candidate[1]
        return lambda asked: weight * _bayes(prior_K, reader.evidence(asked, believed)) + (1 - weight) * prior_K


def _bayes(prior_K: _Reals, evidence_BVK: _Reals) -> _Reals:
    scores_BK = np.log(prior_K) + evidence_BVK.sum(axis=1)
    weights_BK = np.exp(scores_BK - scores_BK.max(axis=1, keepdims=True))
    return np.asarray(weights_BK / weights_BK.sum(axis=1, keepdims=True))


def _classifier(rows: _Rows, reader: _Sums | _Tables, name: FusionName, strength: float) -> Callable[[_Values], _Reals]:
    """Return the probabilities of a classifier of scikit-learn; classes without rows have none."""
    from sklearn.base import clone
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    inputs: Callable[[_Values], Any]
    if name is FusionName.LOGISTIC:
        model, inputs = LogisticRegression(C=strength, max_iter=200), reader.linear
    elif name is FusionName.BOOSTED:
        model, inputs = HistGradientBoostingClassifier(max_iter=60, learning_rate=0.15), reader.ordered
        model.set_params(max_leaf_nodes=15, l2_regularization=1.0, early_stopping=False, random_state=0)
    else:
        model, inputs = clone(rows.estimator), np.asarray
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after 200 steps log loss decides all the same
        model.fit(inputs(rows.values), rows.labels)

    def predict(asked: _Values) -> _Reals:
        found_BK = np.zeros((len(asked), rows.classes))
        if len(asked):
            found_BK[:, np.asarray(model.classes_, dtype=np.int64)] = model.predict_proba(inputs(asked))
        return found_BK

    return predict


class _Tables:
    """Tables of each party's symbols by class, and the inputs that models take from them."""

    def __init__(self, rows: _Rows) -> None:
        assert rows.symbols is not None
        self._symbols, parties = rows.symbols, rows.values.shape[1]
        counts_MSK = np.zeros((parties, self._symbols + 1, rows.classes))
        np.add.at(counts_MSK, (np.arange(parties), rows.values, rows.labels[:, None]), 1)
        counts_MSK = counts_MSK[:, :-1]
        usual_MS1 = (counts_MSK.sum(axis=2, keepdims=True) + 1) / (counts_MSK.sum(axis=(1, 2)) + self._symbols)[
            :, None, None
        ]
        totals_M1K = counts_MSK.sum(axis=1, keepdims=True) + _PRIOR_ROWS
        logs_MSK = np.log((counts_MSK + _PRIOR_ROWS * usual_MS1) / totals_M1K)
        #: What is no symbol says nothing.
        self._scores_SK = (
            None if rows.scores_SK is None else np.concatenate([rows.scores_SK, np.zeros((1, rows.classes))])
        )
        self._logs_MSK = np.concatenate([logs_MSK, np.zeros((parties, 1, rows.classes))], axis=1)  # S says nothing

    def evidence(self, symbols_BM: _Values, believed: float = 0.0) -> _Reals:
        """Return ln P(symbol | class) of every party, (B, M, K), by tables or by the scores that symbols stand for."""
        if believed and self._scores_SK is not None:
            return np.asarray(believed * self._scores_SK[symbols_BM])
        return self._logs_MSK[np.arange(symbols_BM.shape[1]), symbols_BM]

    def _leanings(self, symbols_BM: _Values) -> _Reals:
        """Return how far each symbol speaks for each class beside the others; for two classes one number."""
        found_BMK = self.evidence(symbols_BM)
        found_BMK = (found_BMK - found_BMK.mean(axis=2, keepdims=True))[:, :, found_BMK.shape[2] == 2 :]
        return np.asarray(found_BMK.reshape(len(found_BMK), math.prod(found_BMK.shape[1:])))

    def linear(self, symbols_BM: _Values) -> Any:
        """Return a sparse matrix: indicators of every party's symbol, the tables' leanings, and the sum of scores."""
        from scipy.sparse import csr_matrix, hstack

        rows_B, parties_M = np.nonzero(symbols_BM < self._symbols)
        places = parties_M * self._symbols + symbols_BM[rows_B, parties_M]
        shape = (len(symbols_BM), symbols_BM.shape[1] * self._symbols)
        parts = [csr_matrix((np.ones(len(places)), (rows_B, places)), shape=shape), self._leanings(symbols_BM)]
        if self._scores_SK is not None:
            parts.append(self._scores_SK[symbols_BM].sum(axis=1))
        return hstack(parts, "csr")

    def ordered(self, symbols_BM: _Values) -> _Reals:
        """Return symbols as numbers, NaN for what is none, and the tables' leanings."""
        return np.concatenate(
            [np.where(symbols_BM < self._symbols, symbols_BM, np.nan), self._leanings(symbols_BM)], axis=1
        )


class _Sums:
    """Normal laws of the coordinates of sums, with a mean for each class and one variance for all."""

    def __init__(self, rows: _Rows) -> None:
        self._centre_W = rows.values.mean(axis=0, dtype=np.float64)
        deviation_W = rows.values.std(axis=0, dtype=np.float64)
        self._scale_W = np.where(deviation_W > 0, deviation_W, 1.0)
        scaled_FW = self.linear(rows.values)
        of_class_FK = np.eye(rows.classes)[rows.labels]
        self._mean_WK = scaled_FW.T @ of_class_FK / (of_class_FK.sum(axis=0) + _PRIOR_ROWS)
        self._variance_W = ((scaled_FW - self._mean_WK.T[rows.labels]) ** 2).mean(axis=0) + 1e-6

    def linear(self, sums_BW: _Values) -> _Reals:
        """Return standardised coordinates."""
        return np.asarray(np.clip((sums_BW - self._centre_W) / self._scale_W, -_FARTHEST, _FARTHEST))

    ordered = linear

    def evidence(self, sums_BW: _Values, believed: float = 0.0) -> _Reals:
        """Return ln P(coordinate | class), but for what is the same for all classes, (B, W, K)."""
        del believed
        apart_BWK = self.linear(sums_BW)[:, :, None] - self._mean_WK
        return np.asarray(-(apart_BWK**2) / (2 * self._variance_W[:, None]))

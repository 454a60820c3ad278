"""Fusion models: the label holder's model of classes, given what parties released about the fusion rows.

Every fusion row releases its private embedding once, by the mechanism that predictions use; the label holder knows the
row's true label. Whatever is learned from the two is post-processing. Models that are learned:

    sum        naive Bayes: a table of symbols for each party and class, or normal laws of the sums' coordinates
    logistic   logistic regression on indicators of symbols and what they stand for, or on sums, with a ridge about the
               public reading, the sum of what symbols stand for. The stronger it is, the fewer rows it takes
    boosted    boosted trees on the symbols, on what the tables say of them and on the public reading, or on sums

`auto` is a mixture of all, with the weights that have the least log loss on held-out fusion rows. Where it is
less accurate than the majority class on held-out rows, the classes' shares of the fusion rows are mixed in until it is
not; where that predicts no better than the shares, they are used alone. Predictions release embeddings of the same law,
so noise is learned as it is.

Shape suffixes: F fusion rows, B rows, M parties, W coordinates of a sum, V either of the two, K classes, S symbols, C
candidates, D inputs of a regression, I weights of it for each class.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
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

#: Models that are tried, in the order by which a state has their weights, with the inverse strength of a ridge: the
#: first leaves the public reading but for its scale and the classes' shares. The last is an own classifier, which takes
#: the others' place.
_LOGISTIC = tuple((FusionName.LOGISTIC, strength) for strength in (1e-4, 0.01, 0.1))
_CANDIDATES = ((FusionName.SUM, 0.0), *_LOGISTIC, (FusionName.BOOSTED, 0.0), (FusionName.AUTO, 0.0))
#: Steps towards the best weights, from equal ones; and weights that are not worth learning a model for.
_MIXING_STEPS, _LEAST_WEIGHT = 100, 0.03
#: What the models together have; the classes' shares have the rest.
_PARTS = (1.0, 0.5, 0.25)
#: Up to so many rows are cross-validated in so many folds; of more, one fold is held out, of at most so many rows.
_FEW_ROWS, _FOLDS, _MOST_HELD_OUT = 4000, 4, 20_000
#: From fewer rows for each class, five leaves of 20, trees learn nothing that logistic regression does not know.
_ROWS_OF_TREES = 100
#: A table's row for a class begins with so many rows, which have symbols as often as all classes together; and with
#: this power of what the symbols say of the class by themselves.
_PRIOR_ROWS, _PRIOR_POWER = 16, 0.5
#: Standardised coordinates of sums are clipped to this: noise has long tails, and no honest sum is far beyond them.
_FARTHEST = 8.0
#: A regression begins with this factor of the public reading, as parties know much of the same; and its most steps.
_FACTOR, _STEPS, _TINY = 0.5, 60, 1e-300
#: Rows that are read together: more of them by several threads.
_PIECE_ROWS = 1 << 15
_FIGURES = ("accuracy", "log_loss", "majority")


@dataclass(frozen=True, eq=False)
class FusionModel:
    """Classes of rows from what parties released of them. Made by `fit_fusion` or `from_state`."""

    _rows: _Rows
    #: Weights of `_CANDIDATES`; the classes' shares have what is left to 1.
    _weights: tuple[float, ...]
    #: `accuracy` and `log_loss` of the model, and the `majority` class's accuracy, on held-out fusion rows.
    held_out: dict[str, float]
    _predict: Callable[[_Values], _Reals]

    @property
    def weights(self) -> dict[FusionName, float]:
        """Return the models of the mixture with their weights, the largest first; `auto` is an own classifier."""
        found: dict[FusionName, float] = {}
        for (name, _), weight in zip(_CANDIDATES, self._weights, strict=True):
            if weight:
                found[name] = found.get(name, 0.0) + weight
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def name(self) -> FusionName:
        """Return the model with the largest weight: `auto` for an own classifier, `sum` if there are only shares."""
        return next(iter(self.weights), FusionName.SUM)

    @property
    def majority(self) -> float:
        """Accuracy of the majority class on the held-out fusion rows."""
        return self.held_out["majority"]

    @property
    def beats_majority(self) -> bool:
        """Return whether a model is used at all: one that is not below the majority class on held-out rows."""
        return any(self._weights)

    @property
    def description(self) -> str:
        """Return what the model is and how it did on held-out fusion rows, for reports."""
        rows = f"{len(self._rows.labels):,} fusion rows"
        if self.beats_majority:
            own = f"own classifier {type(self._rows.estimator).__name__}"
            kinds = {FusionName.SUM: "naive Bayes", FusionName.LOGISTIC: "logistic regression", FusionName.AUTO: own}
            parts = [(kinds.get(name, "boosted trees"), weight) for name, weight in self.weights.items()]
            left = 1 - sum(self._weights)
            parts += [("classes' shares", left)] if left > _LEAST_WEIGHT else []
            said = parts[0][0] if len(parts) == 1 else " + ".join(f"{weight:.0%} {name}" for name, weight in parts)
            said += f" on what parties released of {rows}; right on {self.held_out['accuracy']:.1%} of held-out ones"
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
        values_BV = self._rows.read(values_BV)
        pieces = np.array_split(values_BV, max(1, len(values_BV) // _PIECE_ROWS))
        if len(pieces) == 1 or self._rows.estimator is not None:  # an own classifier may take one caller at a time
            return np.log(self._predict(values_BV)).astype(np.float32)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return np.concatenate([np.log(each).astype(np.float32) for each in pool.map(self._predict, pieces)])

    def state(self) -> dict[str, Tensor]:
        """Return the fusion rows' released values and labels, the candidates' weights, and the held-out figures.

        The model is learned again from these: nothing that is loaded is code, and no format of trees is stored.
        """
        import torch

        return {
            "fusion.values": torch.from_numpy(self._rows.values.copy()),
            "fusion.labels": torch.from_numpy(self._rows.labels.copy()),
            "fusion.weights": torch.tensor(self._weights, dtype=torch.float64),
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
            values, labels, weights, figures = (
                state[f"fusion.{name}"].numpy() for name in ("values", "labels", "weights", "figures")
            )
            rows = _Rows(values, labels, num_classes, num_symbols, estimator, scores_SK)
            held_out = dict(zip(_FIGURES, figures.tolist(), strict=True))
            chosen = dict(zip(_CANDIDATES, weights.tolist(), strict=True))
            if not (weights >= 0).all() or not weights.sum() <= 1 + 1e-6:
                raise ValueError(f"weights={weights.tolist()}; permitted: none below 0, together at most 1")
        except (KeyError, ValueError) as error:
            raise ModelError(f"the state of the fusion model cannot be used: {error}; train again") from error
        if any(chosen.values()) and (chosen[_CANDIDATES[-1]] > 0) != (estimator is not None):
            raise ModelError(
                f"the state of the fusion model has weights={weights.tolist()}, with estimator={estimator!r}: give the "
                "own classifier that it was fitted with, or none if there was none"
            )
        return cls(rows, tuple(chosen.values()), held_out, rows.mixture(chosen))


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
        scores_SK: Log shares of classes that each symbol stands for by the public vote and its noise, (S, K), if any.
        choice: The model, or `auto` for the mixture with the least log loss on held-out fusion rows.
        estimator: An own scikit-learn classifier with `predict_proba`, in place of the choice. It is cloned, and fitted
            to the values as they are; a symbol out of range is S to it.

    Raises:
        PlanError: Values, labels, the choice or the classifier are not of this form.
    """
    choice = one_of("fusion", choice, FusionName)
    if estimator is not None and not callable(getattr(estimator, "predict_proba", None)):
        raise PlanError(f"fusion={estimator!r} has no predict_proba; give a scikit-learn classifier that has one")
    rows = _Rows(values_FV, labels_F, num_classes, num_symbols, estimator, scores_SK)

    def is_tried(name: FusionName) -> bool:
        if estimator is not None or choice is not FusionName.AUTO:
            return name is (choice if estimator is None else FusionName.AUTO)
        few = len(rows.labels) < _ROWS_OF_TREES * num_classes
        return name is not FusionName.AUTO and not (few and name is FusionName.BOOSTED)

    tried = [candidate for candidate in _CANDIDATES if is_tried(candidate[0])]
    majority, true_B, shares_CBK = rows.held_out(tried)
    weights_C = _mixing_weights(shares_CBK[:, np.arange(len(true_B)), true_B])
    accuracy, loss, found = majority, math.inf, {}
    for part in _PARTS if len(true_B) else ():
        mixed_BK = part * np.tensordot(weights_C, shares_CBK, axes=1) + (1 - part) * rows.shares_K
        tried_accuracy = float((mixed_BK.argmax(axis=1) == true_B).mean())
        tried_loss, shares_loss = (
            -float(np.log(each_BK[np.arange(len(true_B)), true_B]).mean())
            for each_BK in (mixed_BK, np.broadcast_to(rows.shares_K, mixed_BK.shape))
        )
        if tried_accuracy >= majority and (part == 1 or tried_loss < shares_loss):
            accuracy, loss, found = tried_accuracy, tried_loss, dict(zip(tried, part * weights_C, strict=True))
            break
    weights = {candidate: float(found.get(candidate, 0.0)) for candidate in _CANDIDATES}
    held_out = dict(zip(_FIGURES, (accuracy, loss, majority), strict=True))
    return FusionModel(rows, tuple(weights.values()), held_out, rows.mixture(weights))


def _mixing_weights(shares_CB: _Reals) -> _Reals:
    """Return weights of candidates, given each one's share for the true class of held-out rows.

    Expectation maximisation from equal weights: every step has a smaller log loss.
    """
    weights_C = np.full(len(shares_CB), 1 / len(shares_CB))
    for _ in range(_MIXING_STEPS if shares_CB.size else 0):
        of_each_CB = weights_C[:, None] * shares_CB
        weights_C = (of_each_CB / of_each_CB.sum(axis=0)).mean(axis=1)
    weights_C = np.where(weights_C < _LEAST_WEIGHT, 0.0, weights_C)
    return np.asarray(weights_C / weights_C.sum())


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
        rows_K = np.bincount(self.labels, minlength=classes) + 0.5
        self.shares_K = rows_K / rows_K.sum()

    def read(self, values: _Values) -> _Values:
        """Return symbols, S for whatever is none; or sums, 0 for whatever is no number."""
        values = np.asarray(values)
        if self.symbols is None:
            return np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        fits = (values >= 0) & (values < self.symbols)
        return np.where(fits, values, self.symbols).astype(np.int16)

    def held_out(self, candidates: list[tuple[FusionName, float]]) -> tuple[float, _Values, _Reals]:
        """Return the majority class's accuracy on rows held out, their labels (B), and candidates' shares (C, B, K)."""
        fold_F = np.empty(len(self.labels), dtype=np.int64)
        fold_F[np.argsort(self.labels, kind="stable")] = np.arange(len(fold_F)) % _FOLDS  # classes in equal shares
        by_majority, labels = 0, [self.labels[:0]]
        shares = [np.zeros((len(candidates), 0, self.classes))]
        for fold in range(_FOLDS if len(fold_F) <= _FEW_ROWS else 1):
            asked = np.flatnonzero(fold_F == fold)[:_MOST_HELD_OUT]
            learned = np.flatnonzero(fold_F != fold)[:_MOST_HELD_OUT]
            if not len(asked) or not len(learned):
                continue
            own, true = self.values[learned], self.labels[learned]
            some = _Rows(own, true, self.classes, self.symbols, self.estimator, self.scores_SK)
            by_majority += int((self.labels[asked] == np.bincount(true).argmax()).sum())
            labels.append(self.labels[asked])
            shares.append(np.stack([some.mixture({each: 1.0})(self.values[asked]) for each in candidates]))
        true_B = np.concatenate(labels)
        return by_majority / max(1, len(true_B)), true_B, np.concatenate(shares, axis=1)

    def mixture(self, weights: Mapping[tuple[FusionName, float], float]) -> Callable[[_Values], _Reals]:
        """Return the map of values to probabilities, (B, K), of candidates with weights; of none, the classes' shares.

        One row's worth of the shares is mixed in, so that no class has probability 0.
        """
        prior_K, own = self.shares_K, len(self.labels) / (len(self.labels) + 1)
        weights = {candidate: weight for candidate, weight in weights.items() if weight}
        if not weights or len(np.unique(self.labels)) < 2:
            return lambda asked: np.broadcast_to(prior_K, (len(asked), self.classes))
        reader = _Sums(self) if self.symbols is None else _Tables(self)
        models = [(own * weight, self._learn(reader, prior_K, *candidate)) for candidate, weight in weights.items()]
        left = 1 - own * sum(weights.values())
        return lambda asked: sum(weight * model(asked) for weight, model in models) + left * prior_K

    def _learn(
        self, reader: _Sums | _Tables, prior_K: _Reals, name: FusionName, strength: float
    ) -> Callable[[_Values], _Reals]:
        if name is FusionName.SUM:
            return lambda asked: _softmax(np.log(prior_K) + reader.evidence(asked).sum(axis=1))
        if name is FusionName.LOGISTIC:
            return _regression(self, reader, np.log(prior_K), strength)
        return _classifier(self, reader, name)


def _softmax(scores_BK: _Reals) -> _Reals:
    import torch  # numpy takes many times as long for rows of few numbers

    return torch.from_numpy(scores_BK).softmax(dim=1).numpy()


def _regression(rows: _Rows, reader: _Sums | _Tables, bias_K: _Reals, strength: float) -> Callable[[_Values], _Reals]:
    """Return probabilities by weights of inputs, a bias and a factor of the public reading: only weights have a ridge.

    What symbols stand for depends on them alone, so scores are sums of one number for each symbol. Scikit-learn's
    regression has no such reading beside its inputs.
    """
    from scipy.optimize import minimize

    inputs_FD, basis_DI, public_DK = reader.linear(rows.values), reader.basis, reader.public_DK
    true_FK, size = np.eye(rows.classes)[rows.labels], basis_DI.shape[1] * rows.classes

    def parts(flat: _Reals) -> tuple[_Reals, _Reals, _Reals]:
        """Return weights of the basis, those of inputs, with the public reading's, and the bias."""
        weights_IK = flat[:size].reshape(-1, rows.classes)
        return weights_IK, basis_DI @ weights_IK + flat[-1] * public_DK, flat[size:-1]

    def loss(flat: _Reals) -> tuple[float, _Reals]:
        weights_IK, weights_DK, own_K = parts(flat)
        shares_FK = _softmax(inputs_FD @ weights_DK + own_K)
        apart_FK = shares_FK - true_FK
        slopes_DK = inputs_FD.T @ apart_FK
        slopes_IK = basis_DI.T @ slopes_DK + weights_IK / strength
        value = -np.log(shares_FK[np.arange(len(true_FK)), rows.labels] + _TINY).sum()
        slopes = [slopes_IK.ravel(), apart_FK.sum(axis=0), [(slopes_DK * public_DK).sum()]]
        return value + (weights_IK**2).sum() / (2 * strength), np.concatenate(slopes)

    start = np.concatenate([np.zeros(size), bias_K, [_FACTOR]])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    _, weights_DK, own_K = parts(found)
    return lambda asked: _softmax(reader.linear(asked) @ weights_DK + own_K)


def _classifier(rows: _Rows, reader: _Sums | _Tables, name: FusionName) -> Callable[[_Values], _Reals]:
    """Return the probabilities of a classifier of scikit-learn; classes without rows have none."""
    from sklearn.base import clone
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.exceptions import ConvergenceWarning

    inputs: Callable[[_Values], Any] = np.asarray
    if name is FusionName.BOOSTED:
        model, inputs = HistGradientBoostingClassifier(max_iter=60, learning_rate=0.15), reader.ordered
        model.set_params(max_leaf_nodes=15, l2_regularization=1.0, early_stopping=False, random_state=0)
    else:
        model = clone(rows.estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # held-out rows decide all the same
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
        public_SK = np.zeros((self._symbols, rows.classes)) if rows.scores_SK is None else rows.scores_SK
        counts_MSK = np.zeros((parties, self._symbols + 1, rows.classes))
        np.add.at(counts_MSK, (np.arange(parties), rows.values, rows.labels[:, None]), 1)
        counts_MSK = counts_MSK[:, :-1]
        before_MSK = (counts_MSK.sum(axis=2, keepdims=True) + 1) * np.exp(_PRIOR_POWER * public_SK)
        before_MSK *= _PRIOR_ROWS / before_MSK.sum(axis=1, keepdims=True)
        logs_MSK = np.log((counts_MSK + before_MSK) / (counts_MSK.sum(axis=1, keepdims=True) + _PRIOR_ROWS))
        #: What is no symbol, S, says nothing.
        self._public_SK = np.concatenate(
            [public_SK - public_SK.mean(axis=1, keepdims=True), np.zeros((1, rows.classes))]
        )
        self._logs_MSK = np.concatenate([logs_MSK, np.zeros((parties, 1, rows.classes))], axis=1)

    def evidence(self, symbols_BM: _Values) -> _Reals:
        """Return ln P(symbol | class) of every party by tables, (B, M, K)."""
        return self._logs_MSK[np.arange(symbols_BM.shape[1]), symbols_BM]

    def reading(self, symbols_BM: _Values) -> _Reals:
        """Return the sum of what symbols stand for, (B, K)."""
        return np.asarray(self._public_SK[symbols_BM].sum(axis=1))

    @cached_property
    def basis(self) -> Any:
        """Weights of an indicator: its own, and those of what its symbol stands for, (M (S + 1), M (S + K))."""
        from scipy.sparse import block_diag, csr_matrix

        own_SS = np.eye(len(self._public_SK))[:, :-1]
        return csr_matrix(block_diag([np.hstack([own_SS, self._public_SK])] * len(self._logs_MSK)))

    @property
    def public_DK(self) -> _Reals:
        """What every indicator's symbol stands for."""
        return np.tile(self._public_SK, (len(self._logs_MSK), 1))

    def linear(self, symbols_BM: _Values) -> Any:
        """Return a sparse matrix: indicators of every party's symbol, and of none."""
        from scipy.sparse import csr_matrix

        (rows, parties), each = symbols_BM.shape, self._symbols + 1
        places = (symbols_BM + np.arange(parties, dtype=np.int32) * each).ravel()
        starts = np.arange(0, rows * parties + 1, max(1, parties), dtype=np.int32)
        return csr_matrix((np.ones(rows * parties), places, starts), shape=(rows, parties * each))

    def ordered(self, symbols_BM: _Values) -> _Reals:
        """Return symbols as numbers, NaN for what is none, how far they speak for each class, and the public reading.

        Two classes have one number of each.
        """
        said_BMK = self.evidence(symbols_BM)
        said_BMK = said_BMK - said_BMK.mean(axis=2, keepdims=True)
        first = int(said_BMK.shape[2] == 2)
        parts = [np.where(symbols_BM < self._symbols, symbols_BM, np.nan), self.reading(symbols_BM)[:, first:]]
        return np.concatenate([*parts, *said_BMK[:, :, first:].transpose(1, 0, 2)], axis=1)


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

    @property
    def basis(self) -> _Reals:
        """Every coordinate has a weight of its own."""
        return np.eye(len(self._centre_W))

    @property
    def public_DK(self) -> _Reals:
        """The classes' own coordinates, or a margin's two halves; nothing of other sums."""
        width, classes = self._mean_WK.shape
        if (width, classes) == (1, 2):
            return np.array([[-0.5, 0.5]])
        return np.eye(classes) if width == classes else np.zeros((width, classes))

    def evidence(self, sums_BW: _Values) -> _Reals:
        """Return ln P(coordinate | class), but for what is the same for all classes, (B, W, K)."""
        apart_BWK = self.linear(sums_BW)[:, :, None] - self._mean_WK
        return np.asarray(-(apart_BWK**2) / (2 * self._variance_W[:, None]))

"""VerticalClassifier: a federation as a scikit-learn estimator.

    model = pbmvfl.VerticalClassifier(columns={"bank": ["age", "job"], "shop": ["visits"]}, schema="schema.json")
    model.fit(X, y).predict(new)        # `fit` spends epsilon, `predict` one release a row

A simulation: the caller holds every party's columns and all labels. Between the parties everything is as in
`Federation`, and every release is charged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from pbmvfl.data.column_rules import check_name
from pbmvfl.data.faults import Faults
from pbmvfl.data.labels import number_classes
from pbmvfl.data.new_rows import NewRows, load_rows
from pbmvfl.data.tables import prepare
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, ModelError, PlanError
from pbmvfl.federation.estimator_inputs import (
    check_labels,
    held_by_number,
    is_frame,
    names_of,
    parts_of,
    refuse_amounts,
    row_names,
    table_of,
)
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.predictions import Predictions
from pbmvfl.federation.serving import ReleaseOptions
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON
from pbmvfl.plan.groups import Algorithm, FusionName
from pbmvfl.plan.learning_notes import learning_notes_for
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.composition import epsilon_by_losses
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Unit

#: A prediction that costs more protects nothing, and is not computed closer.
_LARGEST_COST = 1e4
#: Parameters by which predictions are released and charged; they stay as they were in `fit`.
_FIXED_BY_FIT = ("prediction_epsilon", "delta", "unit", "ledger", "dataset")
_FITTED = ("model_", "result_", "classes_", "privacy_", "prediction_privacy_", "n_features_in_", "feature_names_in_")


class VerticalClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier for scikit-learn whose columns belong to different parties.

    After `fit`: `model_` (FederatedModel), `result_` (Result), `privacy_` and `prediction_privacy_` (the cost of
    training and of one prediction, PrivacyTable), `classes_`, `n_features_in_` and, for frames, `feature_names_in_`.
    Rows have no weights (sample_weight). The index of a pandas frame names the rows in the ledgers.

    Args:
        columns: Columns of each party, {"bank": ["age", "job"], "shop": ["visits"]}, by name or by number. Others are
            not read. None: `num_parties` parties hold blocks of columns.
        num_parties: Number of parties that share the columns, where `columns` is None.
        algorithm: "staged", every party alone and one release of a predicted row, or "pbm", the paper's joint rounds.
        epsilon: Privacy budget of training for each row, at `delta`, by the strict account.
        delta: Delta of both budgets; None for a tenth of 1/N, at most 1e-5.
        unit: What epsilon protects: "cell", one party's columns of a row, or "record", the whole row.
        prediction_epsilon: Privacy budget of each later prediction of a row. With "pbm" a row is released as in
            training, and the budget must hold that.
        label_epsilon: Pure epsilon of each training label, against all parties together. None: labels in clear.
        fusion: Model by which predictions are read: "auto", "sum", "logistic", "boosted", or an own scikit-learn
            classifier. It learns from fusion rows, which there are where `prediction_epsilon` is at most `epsilon`.
        schema: Public facts about columns (see `load_table`), for frames; arrays have columns "0", "1", ...
        ledger: Folder of the parties' ledgers, which training and predictions are charged to. None: nothing is charged.
        dataset: The owners' name of these people in the ledgers.
        exact: Predict by exact sums, as only a simulator can: no noise, no charge, no epsilon.
        seed: Public seed of schedules and first weights. Noise has no seed: two fits differ.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[str | int]] | str | None = None,
        *,
        num_parties: int = 2,
        algorithm: Algorithm | str = "staged",
        epsilon: float = 8.0,
        delta: float | None = None,
        unit: Unit | str = "cell",
        prediction_epsilon: float = 8.0,
        label_epsilon: float | None = USUAL_LABEL_EPSILON,
        fusion: Any = "auto",
        schema: Mapping[str, Any] | str | Path | None = None,
        ledger: Path | str | None = None,
        dataset: str = "frame",
        exact: bool = False,
        seed: int = 0,
    ) -> None:
        self.columns = columns
        self.num_parties = num_parties
        self.algorithm = algorithm
        self.epsilon = epsilon
        self.delta = delta
        self.unit = unit
        self.prediction_epsilon = prediction_epsilon
        self.label_epsilon = label_epsilon
        self.fusion = fusion
        self.schema = schema
        self.ledger = ledger
        self.dataset = dataset
        self.exact = exact
        self.seed = seed

    # --- interface of scikit-learn ---

    def fit(self, X: Any, y: Any) -> VerticalClassifier:
        """Train within `epsilon` for each row. With a ledger a second `fit` is charged again.

        Args:
            X: Rows of training, (N, columns): a frame or an array.
            y: Their labels, (N,).

        Returns:
            The estimator itself.

        Raises:
            DataError: Rows, labels or columns cannot be used.
            PlanError: A parameter is out of range, or no plan is within the budget.
            BudgetExceeded: A ledger's limit would end the training early.
        """
        for name in _FITTED:  # a fit that fails leaves no model of other rows behind
            self.__dict__.pop(name, None)
        self._check_parameters()
        data = self._dataset(X, y)
        plan = Plan.for_budget(
            epsilon=self.epsilon,
            delta=self.delta,
            unit=self.unit,
            data=data,
            serving_epsilon=None if self.algorithm == Algorithm.PBM else self.prediction_epsilon,
            algorithm=self.algorithm,
            label_epsilon=self.label_epsilon,
            evaluation="none",
            seed=self.seed,
            fusion=self.fusion if isinstance(self.fusion, str) else FusionName.AUTO,
        )
        delta = usual_delta(data.num_samples) if self.delta is None else self.delta
        self._check_prediction(plan, delta)
        for note in learning_notes_for(plan, data):
            warnings.warn(f"{type(self).__name__}: {note}", UserWarning, stacklevel=2)
        own_fusion = None if isinstance(self.fusion, str) else self.fusion
        result = Federation(plan).fit(data, ledger=self.ledger, fusion=own_fusion)
        assert result.model is not None
        for note in result.warnings if result.fusion is not None else ():
            warnings.warn(f"{type(self).__name__}: {note}", UserWarning, stacklevel=2)
        self._fixed = {name: getattr(self, name) for name in _FIXED_BY_FIT}
        self.result_, self.model_ = result, result.model
        self.privacy_ = result.privacy(delta=delta)
        self.prediction_privacy_ = self.model_.prediction_privacy(
            epsilon=self._own_epsilon, delta=self.delta, unit=self.unit
        )
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Predict the class of each row: one release a row, charged to the ledgers if there are any.

        The same rows again, in the same order, get the released answers without a charge.

        Args:
            X: Rows with the columns of training, (N, columns).

        Returns:
            One of `classes_` for each row, (N,).

        Raises:
            DataError: The rows cannot be used.
            PlanError: A parameter that predictions are charged by was changed since `fit`.
            BudgetExceeded: A ledger's limit does not permit the release.
        """
        found = self._released(X)
        labels: npt.NDArray[Any] = self.classes_[found.numbers]
        return labels

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """Predict the probabilities of each row's classes, from the same release as `predict`.

        Args:
            X: As in `predict`.

        Returns:
            Probabilities, (N, K), in the order of `classes_`.
        """
        return self._released(X).probabilities

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # noise is drawn anew, and has no seed
        tags.classifier_tags.poor_score = True  # a budget of 8 on a few dozen rows leaves little to learn
        return tags

    def __getstate__(self) -> Any:
        if self.__sklearn_is_fitted__():
            raise ModelError(
                "a fitted VerticalClassifier cannot be pickled or copied: the parts of its model belong to different "
                "owners, and a pickle runs code when it is read; use estimator.model_.save(folder) and "
                "pbmvfl.load(folder), or sklearn.base.clone(estimator) for one that is not fitted"
            )
        return super().__getstate__()

    # --- rows ---

    def _released(self, X: Any) -> Predictions:
        check_is_fitted(self)
        for name, value in self._fixed.items():
            if getattr(self, name) != value:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} was {value!r} in fit, by which predictions are planned and "
                    "charged; set it back, fit again, or ask the model itself: estimator.model_.release(...)"
                )
        rows = self._new_rows(X)
        if self.exact:
            return self.model_.release(rows, ReleaseOptions(exact=True))
        options = ReleaseOptions(epsilon=self._own_epsilon, delta=self.delta, unit=self.unit)
        return self.model_.release(rows, options)

    @property
    def _own_epsilon(self) -> float | None:
        """Epsilon of a prediction; None for what was planned with training, which is within the budget."""
        plan = self.model_.plan
        planned = plan.prediction is not None or plan.algorithm is Algorithm.PBM
        return None if planned else self.prediction_epsilon

    def _check_prediction(self, plan: Plan, delta: float) -> None:
        """Refuse a budget of predictions that one release by the mechanism of joint rounds exceeds."""
        if plan.algorithm is not Algorithm.PBM:
            return
        cost = epsilon_by_losses([(1, plan.release.event.losses(Unit(self.unit)))], delta, _LARGEST_COST)
        if cost > self.prediction_epsilon:
            raise PlanError(
                f"prediction_epsilon={self.prediction_epsilon:g} with algorithm=pbm: a row is predicted by the release "
                f"that training makes, which costs {format_epsilon(cost)}; give at least that, a smaller epsilon, or "
                "algorithm='staged'"
            )

    def _dataset(self, X: Any, y: Any) -> VerticalDataset:
        """Return the rows to train on, as every party has them, without test rows."""
        as_table = is_frame(X) or self.schema is not None
        names = names_of(X)
        check_labels(y)
        refuse_amounts(y)
        rows, labels = self._checked(X, as_table=as_table, y=y)
        check_consistent_length(rows, labels)
        numbers, class_names = self._classes(labels)
        held = held_by_number(self.columns, self.num_parties, names=names, width=rows.shape[1])
        self._names = names or tuple(map(str, range(rows.shape[1])))
        if as_table:
            named = {party: [self._names[column] for column in own] for party, own in held.items()}
            table = table_of(rows, self._names)
            found = prepare([table], held=named, label=None, id=None, label_data=None, schema=self.schema)
            columns, features = found.columns, found.features[0]
        else:
            columns, features = None, parts_of(rows, held)
        self._held_columns = held
        return VerticalDataset(
            name=self.dataset,
            party_names=tuple(held),
            train_features=features,
            test_features=tuple(part[:0] for part in features),
            train_labels=numbers,
            test_labels=numbers[:0],
            class_names=class_names,
            default_encoder="mlp",
            train_ids=self._ids(X, len(numbers)),
            test_ids=(),
            columns=columns,
        )

    def _new_rows(self, X: Any) -> NewRows:
        """Return the rows to predict; scikit-learn refuses columns other than those of training."""
        columns = self.model_.columns
        rows = self._checked(X, as_table=columns is not None, reset=False)
        if columns is None:
            features = parts_of(rows, self._held_columns)
        else:
            table = table_of(rows, self._names)
            features = load_rows(table, columns=columns, class_names=self.model_.class_names).features
        return NewRows(
            name=self.dataset,
            party_names=self.model_.party_names,
            features=features,
            ids=self._ids(X, len(features[0])),
            rows_are_named=self.ledger is not None,
        )

    def _checked(self, X: Any, *, as_table: bool, **more: Any) -> Any:
        """Check number, names and kind of columns by scikit-learn; column rules check the values of tables."""
        checks: dict[str, Any] = {"dtype": None, "ensure_all_finite": False} if as_table else {"dtype": np.float32}
        if as_table and is_frame(X):
            checks = {"skip_check_array": True}
        try:
            return validate_data(self, X, **more, **checks)
        except ValueError as error:
            if "could not convert" not in str(error):
                raise
            raise DataError(  # the words of the other error have a value in them
                "X has values that are no numbers; give a DataFrame, and a schema with the vocabulary of such columns"
            ) from None

    def _ids(self, X: Any, count: int) -> tuple[str, ...]:
        """Return the rows' ids: their names, or without a ledger their places.

        A ledger needs names, as row 0 of one fold is another person than row 0 of the next.
        """
        names = row_names(X)
        if names is not None:
            return names
        if self.ledger is not None:
            raise DataError(
                f"ledger={str(self.ledger)!r}: ledgers know rows by their names, and these rows have none, or share "
                "some; give a pandas DataFrame whose index has another name for each row (in a pipeline, steps keep "
                'the index with set_output(transform="pandas"))'
            )
        return tuple(map(str, range(count)))

    def _classes(self, y: Any) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        """Return every row's class by number, and the names of the classes."""
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        if len(y) < 2:
            raise DataError(f"n_samples={len(y)}: there is nothing to learn from one sample; give at least 2 rows")
        classes, numbers = np.unique(y, return_inverse=True)
        faults = Faults()
        names, _ = number_classes([y.tolist()], "y", faults)
        faults.raise_any()
        self.classes_ = classes
        return numbers.astype(np.int64), names

    def _check_parameters(self) -> None:
        """Check the parameters that nothing else checks in time."""
        value = self.prediction_epsilon
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise PlanError(f"prediction_epsilon={value!r} must be a finite number above 0")
        if self.unit not in (Unit.CELL, Unit.RECORD):
            raise PlanError(
                f"unit={self.unit!r} is not permitted; give 'cell', one party's columns of a row, or 'record', the "
                "whole row. For a party's whole table see Plan.for_budget(unit='party')"
            )
        if not isinstance(self.exact, bool | np.bool_):
            raise PlanError(f"exact={self.exact!r} must be True or False")
        try:
            check_name(self.dataset or "")
        except DataError:
            raise DataError(
                f"dataset={self.dataset!r} is not permitted; give the owners' name of these people, a text without / "
                "and \\ that neither begins nor ends with a blank, as in 'patients-2024'"
            ) from None

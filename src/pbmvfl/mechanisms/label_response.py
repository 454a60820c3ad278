"""Drawn labels: k-ary randomised response of each training label, and the inverse of its flip matrix.

    P(drawn = j | true = i) = W / 2^32 for j = i, else w / 2^32        W + (K-1) w = 2^32, W/w <= e^epsilon

The label holder draws each training label once. Everything that a party can see (labels, gradients, class shares,
counts) is computed from the drawn labels alone, so by post-processing it is epsilon-differentially private in every
label, against all parties together.

The flip matrix is T = a I + (1-a)/K J with a = 1 - K w / 2^32, and known to all. Counts of drawn labels c have the
expectation T c_true, so (c - (1-a)/K sum(c)) / a is unbiased.

Shape suffixes: N training rows, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole, finite
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.randomized_response import (
    LARGEST_EPSILON,
    SMALLEST_EPSILON,
    WEIGHT_ONE,
    RandomisedResponse,
    other_weight,
    randomised_symbols,
)

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

#: Label epsilon where none is given.
USUAL_LABEL_EPSILON = 4.0


def check_label_epsilon(value: object) -> float:
    """Return a label epsilon in its range.

    Raises:
        PlanError: It is no number in the range.
    """
    epsilon = finite("label_epsilon", value)
    if not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
        raise PlanError(
            f"label_epsilon={epsilon:g} must be in [{SMALLEST_EPSILON:g}, {LARGEST_EPSILON:g}], or none for labels in "
            "clear"
        )
    return epsilon


@dataclass(frozen=True, kw_only=True)
class LabelResponse:
    """Law by which labels are drawn.

    Args:
        num_classes: K, 2 or more.
        epsilon: Pure epsilon of one label, in [0.01, 16].
    """

    num_classes: int
    epsilon: float

    def __post_init__(self) -> None:
        check_whole("num_classes", self.num_classes, least=2)
        object.__setattr__(self, "epsilon", check_label_epsilon(self.epsilon))

    @cached_property
    def event(self) -> RandomisedResponse:
        """The release of one label, for accounts and ledgers."""
        weight = other_weight(self.num_classes, self.epsilon)
        return RandomisedResponse(num_parties=1, embedding_dim=1, symbols=self.num_classes, other_weight=weight)

    @property
    def kept(self) -> float:
        """Probability a = 1 - K w / 2^32 that a label is the true one; else it is uniform over all K."""
        return 1 - self.num_classes * self.event.other_weight / WEIGHT_ONE

    @property
    def flipped(self) -> float:
        """Probability that a drawn label is another than the true one."""
        return (self.num_classes - 1) * self.event.other_weight / WEIGHT_ONE

    def draw(self, labels_N: npt.NDArray[np.int64], entropy: Entropy) -> npt.NDArray[np.int64]:
        """Return a drawn label for each true one.

        Raises:
            PlanError: A label is outside 0..K-1.
        """
        if labels_N.size and not 0 <= labels_N.min() <= labels_N.max() < self.num_classes:
            raise PlanError(
                f"labels of {labels_N.min()} to {labels_N.max()} with num_classes={self.num_classes}; permitted: 0 to "
                f"{self.num_classes - 1}"
            )
        return randomised_symbols(labels_N, self.num_classes, self.event.other_weight, entropy)

    def corrected_counts(self, counts: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return unbiased counts of true labels from counts of drawn ones, classes along the first axis."""
        uniform = (1 - self.kept) / self.num_classes * counts.sum(axis=0, keepdims=True)
        return np.asarray((counts - uniform) / self.kept, dtype=np.float64)

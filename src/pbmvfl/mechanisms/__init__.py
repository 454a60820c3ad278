"""How an embedding becomes something that may leave the party: sampling, guarantee and estimator side by side."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pbmvfl.mechanisms.exact import Exact
from pbmvfl.mechanisms.gaussian import LocalGaussian
from pbmvfl.mechanisms.pbm import PoissonBinomial
from pbmvfl.plan import Plan
from pbmvfl.privacy.events import ExactRelease, LocalGaussianRelease, ReleaseEvent
from pbmvfl.privacy.table import release_event
from pbmvfl.randomness.secret import Entropy

__all__ = ["Exact", "LocalGaussian", "Mechanism", "PoissonBinomial", "mechanism_for"]


class Mechanism(Protocol):
    """A party's sampler, the server's estimator, and the guarantee, as one object."""

    @property
    def event(self) -> ReleaseEvent:
        """What one row's release is: the numbers that are drawn by, and those that are charged."""

    @property
    def variance_upper_bound(self) -> float: ...

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[Any]: ...

    def estimate(self, total: npt.NDArray[Any]) -> npt.NDArray[np.float32]: ...


def mechanism_for(plan: Plan) -> Mechanism:
    """The plan's mechanism, built from the event that its account charges: they cannot disagree."""
    event = release_event(plan)
    if isinstance(event, ExactRelease):
        return Exact(event=event)
    if isinstance(event, LocalGaussianRelease):
        return LocalGaussian(event=event)
    return PoissonBinomial(
        num_trials=event.num_trials,
        beta=event.beta,
        bound=plan.bound,
        num_parties=event.num_parties,
        embedding_dim=event.embedding_dim,
    )

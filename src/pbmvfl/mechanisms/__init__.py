"""How an embedding becomes something that may leave the party: sampling, guarantee and estimator side by side."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pbmvfl.mechanisms.entropy import Entropy
from pbmvfl.mechanisms.exact import Exact
from pbmvfl.mechanisms.gaussian import LocalGaussian
from pbmvfl.mechanisms.pbm import PoissonBinomial
from pbmvfl.plan import MechanismName, Plan
from pbmvfl.privacy.events import ReleaseEvent

__all__ = ["Exact", "LocalGaussian", "Mechanism", "PoissonBinomial", "mechanism_for"]


class Mechanism(Protocol):
    """A party's sampler, the server's estimator, and the guarantee, as one object."""

    @property
    def event(self) -> ReleaseEvent: ...

    @property
    def variance_upper_bound(self) -> float: ...

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[Any]: ...

    def estimate(self, total: npt.NDArray[Any]) -> npt.NDArray[np.float32]: ...


def mechanism_for(plan: Plan) -> Mechanism:
    """The plan's mechanism."""
    if plan.mechanism is MechanismName.NONE:
        return Exact(num_parties=plan.num_parties, embedding_dim=plan.embedding_dim)
    kind = PoissonBinomial if plan.mechanism is MechanismName.PBM else LocalGaussian
    return kind(
        num_trials=plan.num_trials,
        beta=plan.beta,
        bound=plan.bound,
        num_parties=plan.num_parties,
        embedding_dim=plan.embedding_dim,
    )

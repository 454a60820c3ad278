"""Which noise a simulated run meets: the plan's mechanism, drawn by a generator with a seed of its own."""

from __future__ import annotations

import hashlib
import json

import torch

from pbmvfl.mechanisms import NoisySum
from pbmvfl.plan.plan import Plan

#: What every result of this package says about its noise.
SIMULATED = "simulation"


def noise_seed(plan: Plan) -> int:
    """A seed of its own for every configuration, so that two of them never share noise.

    From the mechanism, the number of parties and the public seed; not from the run's length: a run that goes on longer
    starts alike.
    """
    release = plan.release
    own = [getattr(release, name) for name in release.own_settings()]
    text = json.dumps([release.name, *own, release.bound, plan.num_parties, release.embedding_dim, plan.seed])
    return int.from_bytes(hashlib.sha256(b"simulated noise" + text.encode()).digest()[:8], "big") >> 1


def noisy_sum(plan: Plan, device: torch.device) -> NoisySum:
    """The plan's mechanism as one draw of the sum."""
    return plan.release.simulated_sum(seed=noise_seed(plan), device=device)

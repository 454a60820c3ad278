"""Mechanisms that make an embedding or a score private, one module each, and the registry of them.

A module owns everything about its mechanism: event, ring, payload, sampler, estimator, variance, simulator, text.
Importing this package registers all mechanisms.
May import `crypto`, `privacy`, `errors`, `_settings` and `_compiled`.
Begin with `base`, the interface, then `poisson_binomial`, the paper's Algorithm 1.
"""

from __future__ import annotations

from pbmvfl.mechanisms.base import MECHANISMS, Mechanism, NoisySum, Scratch, register

# In the order in which messages and `--help` name them: the private one first.
# isort: off
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.mechanisms.laplace import PolyaLaplace
from pbmvfl.mechanisms.randomized_response import RandomisedSymbols
from pbmvfl.mechanisms.baselines import LocalGaussian
from pbmvfl.mechanisms.baselines import Exact
# isort: on

__all__ = [
    "MECHANISMS",
    "Exact",
    "LocalGaussian",
    "Mechanism",
    "NoisySum",
    "PoissonBinomial",
    "PolyaLaplace",
    "RandomisedSymbols",
    "Scratch",
    "register",
]

"""How an embedding becomes something that may leave the party: one module a mechanism, and the registry of them."""

from __future__ import annotations

from pbmvfl.mechanisms.base import MECHANISMS, Mechanism, NoisySum, Scratch, register

# In the order in which messages and `--help` name them: the private one first.
# isort: off
from pbmvfl.mechanisms.pbm import PoissonBinomial
from pbmvfl.mechanisms.laplace import PolyaLaplace
from pbmvfl.mechanisms.krr import RandomisedSymbols
from pbmvfl.mechanisms.gaussian import LocalGaussian
from pbmvfl.mechanisms.exact import Exact
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

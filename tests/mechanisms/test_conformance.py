"""Every registered mechanism passes the suite of `mechanism_conformance`; names that nobody registered are errors."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from pbmvfl.errors import LedgerError, PlanError
from pbmvfl.mechanisms import MECHANISMS, Mechanism, PoissonBinomial, PolyaLaplace, register
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.events import EVENTS, PoissonBinomialRelease, event_from_dict, register_event
from support.mechanism_conformance import SIZES, MechanismConformance


class TestPoissonBinomial(MechanismConformance):
    name = "pbm"
    choices: ClassVar[dict[str, Any]] = {"num_trials": 4, "beta": 0.25}
    others: ClassVar[dict[str, Any]] = {"num_trials": 5, "beta": 0.125}


class TestPoissonBinomialInClear(TestPoissonBinomial):
    choices: ClassVar[dict[str, Any]] = {"num_trials": 1, "beta": 0.125, "secure_aggregation": False}
    others: ClassVar[dict[str, Any]] = {"num_trials": 5, "beta": 0.25}


class TestPoissonBinomialLargeBeta(TestPoissonBinomial):
    choices: ClassVar[dict[str, Any]] = {"num_trials": 2, "beta": 0.4375}
    others: ClassVar[dict[str, Any]] = {"num_trials": 3, "beta": 63 / 128}


class TestLocalGaussian(MechanismConformance):
    name = "ldp"
    choices: ClassVar[dict[str, Any]] = {"num_trials": 4, "beta": 0.25}
    others: ClassVar[dict[str, Any]] = {"num_trials": 5, "beta": 0.125}


class TestPolyaLaplace(MechanismConformance):
    name = "laplace"
    choices: ClassVar[dict[str, Any]] = {"levels": 8, "scale": 12.0}
    others: ClassVar[dict[str, Any]] = {"levels": 10, "scale": 20.5, "honest_parties": 2, "bounded_total": True}

    def bits(self, mechanism: Mechanism) -> int:
        """Noise has no largest value: those of 2 (M D + T) + 1 sums, T beyond which noise is once in 2^41."""
        assert isinstance(mechanism, PolyaLaplace)
        r, rate = 3 / (mechanism.honest_parties or 3), 1 / mechanism.scale
        z = np.linspace(rate / 64, rate * 63 / 64, 63)
        moments = 2 * np.log1p(-np.exp(-rate)) - np.log1p(-np.exp(z - rate)) - np.log1p(-np.exp(-z - rate))
        noise = math.ceil(float(np.min((r * moments + 41 * math.log(2)) / z)))
        return (2 * (3 * mechanism.levels + noise)).bit_length()

    def test_the_ring_holds_every_sum_and_is_no_larger_than_needed(self) -> None:
        mechanism = self.plan().release
        assert mechanism.ring is not None
        assert mechanism.ring.bits == self.bits(mechanism)
        assert self.plan(secure_aggregation=False).traffic().bytes_up == self.plan().traffic().bytes_up


class TestPolyaLaplaceAgainstColluders(TestPolyaLaplace):
    choices: ClassVar[dict[str, Any]] = {"levels": 2, "scale": 0.75, "honest_parties": 1}
    others: ClassVar[dict[str, Any]] = {"levels": 4, "scale": 1.0, "honest_parties": 2, "bounded_total": True}


class TestPolyaLaplaceInClear(TestPolyaLaplace):
    choices: ClassVar[dict[str, Any]] = {"levels": 64, "scale": 300.0, "secure_aggregation": False}
    feasible = 40.0


class TestPolyaLaplaceShares(TestPolyaLaplace):
    """Coordinates of a row that are not negative and add up to at most C."""

    choices: ClassVar[dict[str, Any]] = {"levels": 8, "scale": 12.0, "bounded_total": True}
    others: ClassVar[dict[str, Any]] = {"levels": 10, "scale": 20.5, "honest_parties": 2, "bounded_total": False}
    embeddings: ClassVar[npt.NDArray[np.float64]] = np.array(
        [[0, 0, 0], [0.5, 0.5, 0.5], [0.25, 0.5, 0], [0, 0.125, 0.5], [0.375, 0, 0]]
    )


class TestPolyaLaplaceSharesInClear(TestPolyaLaplaceShares):
    choices: ClassVar[dict[str, Any]] = {
        "levels": 64,
        "scale": 300.0,
        "bounded_total": True,
        "secure_aggregation": False,
    }
    feasible = 40.0


class TestRandomisedSymbols(MechanismConformance):
    name = "krr"
    choices: ClassVar[dict[str, Any]] = {"symbols": 5, "response_epsilon": 2.0}
    others: ClassVar[dict[str, Any]] = {"symbols": 9, "response_epsilon": 1.0}
    noisiest = 1


class TestRandomisedSymbolsBehindMasks(TestRandomisedSymbols):
    choices: ClassVar[dict[str, Any]] = {"symbols": 9, "response_epsilon": 3.0, "secure_aggregation": True}
    others: ClassVar[dict[str, Any]] = {"symbols": 5, "response_epsilon": 1.0}


class TestExact(MechanismConformance):
    name = "none"


def test_every_registered_mechanism_has_a_suite() -> None:
    suites = [each for each in globals().values() if isinstance(each, type) and issubclass(each, MechanismConformance)]
    assert {suite.name for suite in suites if suite is not MechanismConformance} == set(MECHANISMS)


@pytest.mark.parametrize("name", ["nope", "PBM", "", None, 3, [], "prediction"])
def test_a_mechanism_that_nobody_registered_is_an_error_everywhere(name: Any) -> None:
    with pytest.raises(PlanError, match=r"mechanism=.* is not one of"):
        Plan.of(**SIZES, mechanism=name)
    with pytest.raises(PlanError, match=r"mechanism=.* is not one of"):
        MECHANISMS[name]
    plan = Plan.of(**SIZES).to_dict()
    plan["release"]["mechanism"] = name
    with pytest.raises(PlanError, match=r"mechanism=.* is not one of"):
        Plan.from_dict(plan)
    with pytest.raises(LedgerError, match=r"event=.* is not one of"):
        EVENTS[name]
    with pytest.raises(LedgerError, match=r"event=.* is not one of"):
        event_from_dict({"event": name, "num_parties": 3, "embedding_dim": 1})


def test_an_event_without_a_name_is_an_error() -> None:
    with pytest.raises(LedgerError, match="is not one of"):
        event_from_dict({"num_parties": 3, "embedding_dim": 1})


def test_a_name_that_is_taken_cannot_be_registered_again() -> None:
    with pytest.raises(PlanError, match="mechanism='pbm' is registered already"):
        register(PoissonBinomial)
    with pytest.raises(LedgerError, match="event='poisson-binomial' is registered already"):
        register_event(PoissonBinomialRelease)
    assert MECHANISMS["pbm"] is PoissonBinomial
    assert EVENTS["poisson-binomial"] is PoissonBinomialRelease

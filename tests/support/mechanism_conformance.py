"""What every mechanism must keep to, whoever wrote it: a suite to inherit, with one subclass for each mechanism.

    class TestMine(MechanismConformance):
        name = "mine"
        choices = {"my_number": 3}

Laws are tested at embeddings of 0, C/2 and C of either sign, at settings where these are exact: what rounding costs in
between is the business of each mechanism's own tests. False alarm of a test: at most `statistical.FALSE_ALARM`.
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import LedgerError, PlanError
from pbmvfl.mechanisms import MECHANISMS, Mechanism, Scratch
from pbmvfl.plan.flat_names import plan_settings
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.privacy.events import EVENTS, ReleaseEvent, event_from_dict
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.units import CURIOUS_PARTY, SERVER, Adversary, Unit
from support import statistical
from support.known_randomness import SeededEntropy

SIZES: dict[str, Any] = {"num_parties": 3, "num_samples": 400, "num_classes": 2, "batch_size": 50, "num_epochs": 2}
#: Every party's embedding, in units of the bound; a row of it is one case.
EMBEDDINGS = np.array([[0, 0, 0], [1, 1, 1], [-1, -1, -1], [0.5, -1, 1], [-0.5, 0.5, 0]])
BOUND = 1.5
#: Estimates are float32 numbers; this is far above what they round and far below what a test could see.
FLOAT32_SHARE = 1e-5


class MechanismConformance:
    """Inherit, and name the mechanism."""

    name: ClassVar[str]
    #: Numbers of its own for which embeddings of C/2 are released without rounding.
    choices: ClassVar[dict[str, Any]] = {}
    #: Another permitted value for each of its own numbers.
    others: ClassVar[dict[str, Any]] = {}
    #: An epsilon for a cell of SIZES with 2 coordinates that some setting of a private mechanism meets, at delta 1e-5.
    feasible: ClassVar[float] = 8.0
    #: The row of EMBEDDINGS where the noise is as large as it says.
    noisiest: ClassVar[int] = 0
    #: Other cases, for a mechanism that takes other embeddings; as many.
    embeddings: ClassVar[npt.NDArray[np.float64]] = EMBEDDINGS

    def plan(self, **choices: Any) -> Plan:
        return Plan.of(
            **{**SIZES, "mechanism": self.name, "embedding_dim": 2, "bound": BOUND, **self.choices, **choices}
        )

    def estimates(self, mechanism: Mechanism, embedding_M: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Draws of the estimated sum by all that happens to it: drawn, written, added up and read."""
        entropy, form = SystemEntropy(), mechanism.payload
        count = statistical.NUM_DRAWS
        sent = [
            form.encode(mechanism.randomize(np.full(count, x, dtype=np.float32), entropy)) for x in embedding_M.tolist()
        ]
        return mechanism.estimate(form.total(sent, count)).astype(np.float64)

    def bits(self, mechanism: Mechanism) -> int:
        """Of one value: those of the largest sum behind masks, those of a party's largest value without them."""
        largest = int(mechanism.randomize(np.full(5000, 1e30, dtype=np.float32), SystemEntropy()).max())
        return (largest * mechanism.num_parties if mechanism.secure_aggregation else largest).bit_length()

    # --- forms ---

    def test_its_name_is_the_one_that_it_is_registered_under(self) -> None:
        assert MECHANISMS[self.name].name == self.name
        assert type(self.plan().release) is MECHANISMS[self.name]
        assert self.plan().mechanism == self.name

    def test_plans_survive_json_and_flat_names_with_the_same_hash(self) -> None:
        plan = self.plan()
        for again in (Plan.from_json(plan.to_json()), Plan.of(**plan.flat()), plan.replace()):
            assert again == plan
            assert again.hash == plan.hash
        assert json.loads(plan.to_json()) == plan.to_dict()

    def test_each_of_its_own_numbers_is_in_the_hash_and_is_explained(self) -> None:
        plan, explained = self.plan(), plan_settings()
        assert set(self.others) == set(MECHANISMS[self.name].own_settings()) <= set(explained)
        for name, value in self.others.items():
            other = plan.replace(**{name: value})
            assert getattr(other.release, name) == value != getattr(plan.release, name)
            assert other.hash != plan.hash
            assert explained[name].help

    def test_its_event_survives_a_ledger_s_form_and_nothing_like_it_does(self) -> None:
        event = self.plan().release.event
        written = json.loads(json.dumps(event.to_dict()))
        assert event_from_dict(written) == event
        assert type(event_from_dict(written)) is EVENTS[event.name]
        with pytest.raises(LedgerError):
            event_from_dict({**written, "colour": 1})
        with pytest.raises(LedgerError):
            event_from_dict({name: value for name, value in written.items() if name != "embedding_dim"})

    def test_it_says_in_words_what_it_is(self) -> None:
        release = self.plan().release
        assert release.words.strip()
        assert release.describe().strip()
        assert all(note.strip() for note in release.notes)
        assert all(condition.strip() for condition in release.event.conditions)
        assert release.event.conditions

    # --- the account ---

    @pytest.mark.parametrize("adversary", [SERVER, CURIOUS_PARTY, Adversary(colluding_parties=2)], ids=str)
    @pytest.mark.parametrize("unit", list(Unit))
    def test_one_release_costs_something_finite_exactly_if_it_is_private(
        self, unit: Unit, adversary: Adversary
    ) -> None:
        release = self.plan().release
        curve = release.event.rdp(unit, adversary)
        assert curve.shape == (len(ORDERS),)
        assert np.all(curve > 0)
        if release.is_private:
            assert np.all(np.isfinite(curve))
            assert np.all(np.diff(curve) >= 0)
        else:
            assert np.all(np.isinf(curve))
        few = release.event.rdp(unit, adversary, (2.0, 8.0))
        assert few.shape == (2,)

    def test_more_coordinates_cost_more(self) -> None:
        one, two = (self.plan(embedding_dim=dim).release for dim in (1, 2))
        costs = [release.event.rdp(Unit.CELL) for release in (one, two)]
        if one.is_private:
            assert np.all(costs[0] < costs[1])
        else:  # without noise a coordinate already costs everything
            assert np.all(np.isinf(costs))

    def test_its_event_is_what_the_account_of_a_plan_has(self) -> None:
        plan = self.plan()
        assert plan.training_run().releases == (plan.release.event,)
        assert isinstance(plan.release.event, ReleaseEvent)
        assert plan.release.event in plan.events(JOINT)
        sizes = (plan.release.event.num_parties, plan.release.event.embedding_dim)
        assert sizes == (plan.num_parties, plan.embedding_dim)
        table = plan.privacy()
        assert all(math.isfinite(row.epsilon) is plan.release.is_private for row in table.of_columns)

    # --- the law ---

    @pytest.mark.parametrize("case", range(len(EMBEDDINGS)))
    def test_the_estimate_is_unbiased_and_no_noisier_than_it_says(self, case: int) -> None:
        mechanism = self.plan().release
        embedding_M = BOUND * self.embeddings[case]
        errors = self.estimates(mechanism, embedding_M) - embedding_M.sum()
        if mechanism.variance_upper_bound == 0:
            assert np.all(errors == 0)
            return
        most = mechanism.variance_upper_bound * (1 + FLOAT32_SHARE)
        assert not statistical.mean_rejects(errors)
        assert not statistical.variance_rejects(errors, most)
        # The controls, which must fail: a bias of a thirtieth of the noise, and a tenth of the noise that is there.
        assert statistical.mean_rejects(errors + math.sqrt(most) / 30)
        assert statistical.variance_rejects(errors, float(errors.var()) / 10)

    def test_the_noise_is_as_large_as_it_says_somewhere(self) -> None:
        """A bound that nothing attains would hide a wrong formula. The middle is where bits are noisiest."""
        mechanism = self.plan().release
        embedding_M = BOUND * self.embeddings[self.noisiest]
        errors = self.estimates(mechanism, embedding_M) - embedding_M.sum()
        if mechanism.variance_upper_bound:
            assert statistical.variance_rejects(errors, 0.95 * mechanism.variance_upper_bound)
        else:
            assert np.all(errors == 0)

    @pytest.mark.parametrize("case", range(len(EMBEDDINGS)))
    def test_a_simulated_sum_has_the_same_mean_and_variance(self, case: int) -> None:
        mechanism = self.plan().release
        embedding_M = BOUND * self.embeddings[case]
        simulated = mechanism.simulated_sum(seed=case, device=torch.device("cpu"))
        embedding_MBP = torch.from_numpy(embedding_M.astype(np.float32))[:, None, None]
        drawn = simulated(embedding_MBP.expand(-1, statistical.NUM_DRAWS, 1).contiguous())
        ours = drawn.numpy().ravel().astype(np.float64) - embedding_M.sum()
        theirs = self.estimates(mechanism, embedding_M) - embedding_M.sum()
        if mechanism.variance_upper_bound == 0:
            assert np.array_equal(ours, theirs)
            return
        # Equal laws make differences symmetric, where the false alarm rate is a theorem.
        assert not statistical.mean_rejects(ours - theirs)
        assert not statistical.mean_rejects(ours**2 - theirs**2)
        assert statistical.mean_rejects(1.05 * (ours**2) - theirs**2 / 1.05)

    def test_a_simulation_goes_on_where_its_state_was(self) -> None:
        mechanism = self.plan().release
        embedding_MBP = torch.zeros(mechanism.num_parties, 20, 2)
        first = mechanism.simulated_sum(seed=1, device=torch.device("cpu"))
        first(embedding_MBP)
        state = first.state().clone()
        expected = first(embedding_MBP)
        again = mechanism.simulated_sum(seed=1, device=torch.device("cpu"))
        again.load_state(state)
        assert torch.equal(again(embedding_MBP), expected)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_no_number_is_released_as_one_that_is_permitted(self, bad: float) -> None:
        """NaN as 0, infinity as an end: whether a party answers must not depend on its columns."""
        mechanism = self.plan().release
        values = np.zeros((4, 2), dtype=np.float32)
        values[2, 1] = bad
        released = mechanism.randomize(values, SystemEntropy(), Scratch())
        assert np.isfinite(released.astype(np.float64)).all()
        stands_for = 0.0 if np.isnan(bad) else math.copysign(mechanism.bound, bad)
        rows = [np.full((3, 2), each, dtype=np.float32) for each in (bad, stands_for)]
        twins = [mechanism.randomize(each, SeededEntropy(b"odd")) for each in rows]
        assert np.array_equal(twins[0], twins[1])

    # --- what travels ---

    @pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 250])
    def test_payloads_have_exactly_the_bytes_that_they_say_and_add_up(self, count: int) -> None:
        mechanism = self.plan().release
        form, entropy = mechanism.payload, SystemEntropy()
        values = np.linspace(-BOUND, BOUND, count).astype(np.float32)
        drawn = [mechanism.randomize(values, entropy) for _ in range(mechanism.num_parties)]
        masked = drawn
        if mechanism.secure_aggregation:
            assert mechanism.ring is not None
            # Masks that cancel in the ring: all but the last at random, the last what is left.
            size, kind = 1 << mechanism.ring.bits, mechanism.ring.dtype
            random = np.random.default_rng(count).integers(0, size, (mechanism.num_parties - 1, count))
            masks = [mask.astype(kind) for mask in (*random, -random.sum(axis=0) % size)]
            masked = [each + mask for each, mask in zip(drawn, masks, strict=True)]
        sent = [form.encode(each) for each in masked]
        for payload in sent:
            assert len(payload) == form.num_bytes(count)
            form.check(payload)
        total = form.total(sent, count)
        if mechanism.ring is None:
            expected = np.zeros(count, dtype=np.float32)
            for each in drawn:
                expected = expected + each
            assert np.array_equal(total, expected)
        else:
            size = 1 << mechanism.ring.bits
            assert total.tolist() == [sum(int(each[i]) for each in drawn) % size for i in range(count)]
            assert form.num_bytes(count) == math.ceil(count * self.bits(mechanism) / 8)

    def test_the_ring_holds_every_sum_and_is_no_larger_than_needed(self) -> None:
        mechanism = self.plan().release
        if mechanism.ring is None:
            with pytest.raises(PlanError, match="secure_aggregation=True"):
                self.plan(secure_aggregation=True)
            return
        top = mechanism.randomize(np.full(5000, 1e30, dtype=np.float32), SystemEntropy()).max()
        assert mechanism.num_parties * int(top) < 1 << mechanism.ring.bits
        assert self.plan(secure_aggregation=False).traffic().bytes_up <= self.plan().traffic().bytes_up

    def test_traffic_of_a_plan_is_the_payloads_and_headers_of_its_rounds(self) -> None:
        plan = self.plan(num_samples=130)  # batches of 50, 50 and 30
        payloads = sum(plan.release.payload.num_bytes(rows * 2) for rows in (50, 50, 30) * 2)
        headers = plan.traffic().bytes_up - plan.num_parties * payloads
        assert headers == 44 * plan.num_parties * 6

    # --- planning ---

    def test_a_planner_stays_within_a_budget_and_uses_it(self) -> None:
        wanted: dict[str, Any] = {"delta": 1e-5, "unit": "cell", "accounting": "paper", "embedding_dim": 2}
        wanted |= {**SIZES, "mechanism": self.name}
        if not MECHANISMS[self.name](num_parties=3).is_private:
            with pytest.raises(PlanError, match="no plan is within"):
                Plan.for_budget(epsilon=self.feasible, **wanted)
            return
        plan = Plan.for_budget(epsilon=self.feasible, **wanted)
        assert plan.mechanism == self.name
        assert 0.5 * self.feasible < plan.privacy(delta=1e-5).epsilon("cell", "paper") <= self.feasible
        tight = Plan.for_budget(epsilon=self.feasible / 2, **wanted)
        assert tight.release.variance_upper_bound > plan.release.variance_upper_bound
        with pytest.raises(PlanError, match="no plan is within"):
            Plan.for_budget(epsilon=1e-9, **wanted)

    def test_a_planner_keeps_what_was_fixed(self) -> None:
        release = self.plan().release
        if release.is_private:
            own = {name: getattr(release, name) for name in (*type(release).own_settings(), "secure_aggregation")}
            epsilon = self.plan().privacy(delta=1e-5).epsilon("cell", "paper")
            wanted: dict[str, Any] = {"delta": 1e-5, "unit": "cell", "accounting": "paper", "embedding_dim": 2}
            wanted |= {**SIZES, "mechanism": self.name, "bound": BOUND, **own}
            assert Plan.for_budget(epsilon=epsilon * 1.001, **wanted).release == release
            with pytest.raises(PlanError, match="no plan is within"):
                Plan.for_budget(epsilon=epsilon * 0.98, **wanted)

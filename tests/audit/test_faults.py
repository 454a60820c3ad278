"""Faults planted in the code that parties run: each must be caught, and the sound build must pass the same tests.

False alarms: a test of the sound build fails with a probability of at most (number of p-values) * 10 * LEVEL, below
1e-6 for all of this file together. Power: an alarm takes 6.5 deviations. Beta wrong by 1% moves a count by 20; noise 5%
too small moves the variance of 25,000 draws by 10.9, noise 10% too small that of 9,600 draws by 13; a label that is not
drawn stays unseen with a probability below 1e-10. All other faults move a statistic by more than 20 deviations, or are
seen without any chance in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pbmvfl.audit import laws, sessions, training
from pbmvfl.audit.constants import LEVEL, TRIALS
from pbmvfl.audit.statistics import Finding
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.crypto.ring import Ring
from pbmvfl.mechanisms import PoissonBinomial
from support import planted_faults as faults

PBM = PoissonBinomial(num_parties=4, num_trials=16, beta=0.25, embedding_dim=4, secure_aggregation=True)
DATA = training.training_data()
PLAN = training.training_plan(DATA)
WIDE = training.wide_data()

Findings = Callable[[], Iterable[Finding]]


def law_of_pbm() -> Iterable[Finding]:
    return laws.mechanism_tests(PBM, SystemEntropy(), TRIALS)


def masks() -> Iterable[Finding]:
    return sessions.mask_tests(Ring(7), TRIALS)


def wire() -> Iterable[Finding]:
    return sessions.wire_tests(PBM)


def step_noise() -> Iterable[Finding]:
    return training.step_noise_tests(training.training_plan(WIDE), WIDE, 25_000)


def shifts() -> Iterable[Finding]:
    return training.shift_tests(PLAN, DATA)[0]


def fusion_rows() -> Iterable[Finding]:
    return training.fusion_tests(DATA)


def label_uses() -> Iterable[Finding]:
    return sessions.label_use_tests(sessions.sessions_to_see(LEVEL))


def noise_of_trainings() -> Iterable[Finding]:
    return training.training_game(PLAN, DATA, 12, shift=0.0, level=LEVEL)[1]


def alarms(findings: Iterable[Finding]) -> set[str]:
    """Names of the laws that are contradicted."""
    return {each.law for each in findings if each.p_value < LEVEL}


#: Name, fault, the part of the audit that must see it, and laws of which at least one must be named.
FAULTS: list[tuple[str, faults.Plant, Findings, set[str]]] = [
    ("beta 1% too large", faults.beta_times(1.01), law_of_pbm, {"beta"}),
    ("beta 1% too small", faults.beta_times(0.99), law_of_pbm, {"beta"}),
    ("the clamp removed", faults.no_clamp, law_of_pbm, {"mean"}),
    ("a biased top residue", faults.top_residue_missing, masks, {"top residue"}),
    ("a mask reused after a restart", faults.masks_reused_after_a_restart, wire, {"masks after a restart"}),
    ("a party's mask omitted", faults.mask_omitted, wire, {"uniform"}),
    ("noise seeded, releases", faults.noise_seeded, wire, {"fresh noise after a restart"}),
    ("noise seeded, updates", faults.noise_seeded, training.fresh_step_tests, {"fresh at each party and start"}),
    ("noise again in every round", faults.noise_rewound_every_round, wire, {"fresh noise in later rounds"}),
    ("one mask for all kinds", faults.one_mask_for_all_kinds, masks, {"own masks for each kind"}),
    ("update noise 5% too small", faults.update_noise_times(0.95), step_noise, {"variance"}),
    ("the same in whole trainings", faults.update_noise_times(0.9), noise_of_trainings, {"variance"}),
    ("clipping by batch", faults.clipping_by_batch, shifts, {"shift of one step"}),
    ("a row used twice", faults.row_used_twice, shifts, {"shift of the training", "uses of a row"}),
    ("a fusion row that trains", faults.fusion_row_that_trains, fusion_rows, {"fusion rows train nothing"}),
    ("statistics of all rows", faults.preparation_of_all_rows, fusion_rows, {"fusion rows train nothing"}),
    ("batch statistics", faults.batch_statistics, shifts, {"other rows stay"}),
    ("one gradient from a true label", faults.one_gradient_of_a_true_label, label_uses, {"one draw for all rounds"}),
    ("one label never drawn", faults.one_label_never_drawn, label_uses, {"each row is drawn"}),
]


@pytest.mark.parametrize(("plant", "part", "named"), [each[1:] for each in FAULTS], ids=[each[0] for each in FAULTS])
def test_a_planted_fault_is_caught(
    plant: faults.Plant, part: Findings, named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert named & alarms(part())


@pytest.mark.parametrize("part", list(dict.fromkeys(each[2] for each in FAULTS)), ids=lambda part: part.__name__)
def test_the_sound_build_passes_the_same_part(part: Findings) -> None:
    found = list(part())
    assert found
    assert [each for each in found if each.p_value < LEVEL] == []


def test_a_row_that_is_used_twice_is_seen_in_the_shift_and_in_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.row_used_twice(monkeypatch)
    assert {"shift of the training", "uses of a row"} <= alarms(shifts())


def test_clipping_by_batch_and_batch_statistics_exceed_the_shift_of_a_whole_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mu = training.account_mu(PLAN)
    assert training.shift_tests(PLAN, DATA)[1] == pytest.approx(mu, rel=2e-3)
    for plant in (faults.clipping_by_batch, faults.batch_statistics):
        with monkeypatch.context() as patch:
            plant(patch)
            assert training.shift_tests(PLAN, DATA)[1] > 1.1 * mu

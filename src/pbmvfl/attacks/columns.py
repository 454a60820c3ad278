"""Attacks on the columns of a joint training: tests of a cell and of a record, recovery of cells, learned decoders.

The attacker has half of the training rows as auxiliary knowledge; scores are of the other half, the targets.

Shape suffixes: E epochs, C games, T targets, V candidate values, M parties, P embedding_dim, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.attacks.decoders import decode
from pbmvfl.attacks.likelihood import draw_counts, log_likelihood, probabilities
from pbmvfl.attacks.replay import can_replay, random_cells, replay
from pbmvfl.attacks.scores import (
    SERVER_ALONE,
    Attacker,
    Score,
    most_right,
    network_observer,
    server_with,
    share_right,
)
from pbmvfl.attacks.transcripts import Probes, Transcript, transcript
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import EpsilonBound, epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit

Array = npt.NDArray[Any]
#: Rows of the replay's networks times rounds times weights that take about ten seconds on a core.
_REPLAY_WORK = 1.5e11
#: Largest number of candidate values of a cell, the commonest of the auxiliary rows.
_MOST_VALUES = 600
_TARGETS = 1500


@dataclass(frozen=True, kw_only=True, eq=False)
class TableAttack:
    """One joint training as an attacker sees it.

    Args:
        data: The rows.
        seen: Its training.
        setting: Its name.
        probes: Pairs of rows that were embedded beside it.
        auxiliary: Rows that the attacker knows.
        targets: Rows that it attacks.
        delta: Of every epsilon.
    """

    data: VerticalDataset
    seen: Transcript
    setting: str
    probes: Probes
    auxiliary: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    seed: int
    delta: float = 1e-5

    @property
    def plan(self) -> Plan:
        return self.seen.plan

    @property
    def exact(self) -> str:
        """Return the name of the same training with exact sums, where nothing is private."""
        return f"exact sums of {self.setting}"

    @property
    def pbm(self) -> PoissonBinomial:
        assert isinstance(self.plan.release, PoissonBinomial)
        return self.plan.release

    def bound(self, unit: Unit, accounting: Accounting, attacker: Attacker) -> EpsilonBound:
        """Return the account's bound of this training against an attacker."""
        return epsilon_bound(self.plan.training_run(), unit, accounting, attacker.adversary, delta=self.delta)


def attack_table(plan: Plan, data: VerticalDataset, *, setting: str, seed: int, games: int = 2000) -> TableAttack:
    """Train once with made-up noise and return what attacks need.

    Args:
        plan: A joint plan with the Poisson binomial mechanism.
        data: The rows.
        setting: Name of the setting.
        seed: Of noise, pairs and auxiliary rows.
        games: Pairs for the tests of cells and records.

    Raises:
        PlanError: The plan is of another kind.
    """
    if not isinstance(plan.release, PoissonBinomial):
        raise PlanError(f"mechanism={plan.mechanism}: attacks on joint training are written for mechanism=pbm")
    random = np.random.default_rng(seed)
    order = random.permutation(data.num_samples)
    auxiliary, targets = order[: len(order) // 2], order[len(order) // 2 :]
    row_C = random.choice(targets, size=games)
    probes = Probes(row_C=row_C, other_C=random.integers(data.num_samples, size=games))
    seen = transcript(plan, data, seed=seed + 1, probes=probes)
    return TableAttack(
        data=data, seen=seen, setting=setting, probes=probes, auxiliary=auxiliary, targets=targets, seed=seed
    )


# --- tests of two values, own releases, networks known ---


def pair_scores(table: TableAttack) -> list[Score]:
    """Score the likelihood-ratio test of a cell and of a record, for each attacker."""
    plan, probes = table.plan, table.probes
    random = np.random.default_rng(table.seed + 2)
    true_ECMP = table.seen.embedding_ENMP[:, probes.row_C]
    other_ECMP = table.seen.probe_ECMP(len(probes.row_C))
    counts_ECMP = draw_counts(table.pbm, true_ECMP, random)
    parts = data_of(table.data)
    differs_MC = np.stack([(part[probes.row_C] != part[probes.other_C]).any(1) for part in parts])
    party_C = np.array([random.choice(np.flatnonzero(d)) if d.any() else 0 for d in differs_MC.T])
    count = plan.num_parties
    attackers = [SERVER_ALONE, server_with(count, 1), network_observer(count)]
    if count > 2:
        attackers.insert(2, server_with(count, count - 1))
    found = []
    for attacker in attackers:
        for unit in (Unit.CELL, Unit.RECORD):
            if unit is Unit.RECORD and attacker is not SERVER_ALONE:
                continue
            games = differs_MC.any(0)
            ratio = _ratios(table, counts_ECMP, true_ECMP, other_ECMP, party_C, attacker, unit)[games]
            right = np.where(ratio == 0, random.random(len(ratio)) < 0.5, ratio > 0)
            bound = table.bound(unit, Accounting.PAPER, attacker)
            found.append(
                share_right(
                    right,
                    0.5,
                    attack=f"which of two values of a {unit}",
                    attacker=attacker,
                    setting=table.setting,
                    bound=0.5 + bound.advantage_upper_bound / 2,
                    bound_words=f"{unit}, own releases",
                )
            )
    return found


def data_of(data: VerticalDataset) -> list[Array]:
    """Return each party's training rows as numbers (N, D)."""
    # Minus zero equals zero but has other bytes, by which values are looked up.
    return [part.reshape(len(part), -1) + 0 for part in data.train_features]


def _ratios(
    table: TableAttack,
    counts_ECMP: Array,
    true_ECMP: Array,
    other_ECMP: Array,
    party_C: Array,
    attacker: Attacker,
    unit: Unit,
) -> npt.NDArray[np.float64]:
    """Return log likelihood ratios of the true values against the others, by a row's own releases."""
    pbm = table.pbm
    games, count = np.arange(len(party_C)), table.plan.num_parties
    p_true, p_other = probabilities(pbm, true_ECMP), probabilities(pbm, other_ECMP)
    if not attacker.sums:
        chosen = (slice(None), games, party_C)
        p_0, p_1, counts = p_true[chosen][..., None], p_other[chosen][..., None], counts_ECMP[chosen]
    else:
        # Parties beside the cell's own that are on the attacker's side leave the sum.
        honest = count - attacker.adversary.colluding_parties
        order = (party_C[:, None] + np.arange(honest)) % count
        mixed = p_true.copy() if unit is Unit.CELL else p_other
        if unit is Unit.CELL:
            mixed[:, games, party_C] = p_other[:, games, party_C]
        index = (slice(None), games[:, None], order)
        p_0, p_1 = (np.moveaxis(each[index], 2, -1) for each in (p_true, mixed))
        counts = counts_ECMP[index].sum(2)
    trials = pbm.num_trials
    ratio_ECP = log_likelihood(counts, p_0, trials) - log_likelihood(counts, p_1, trials)
    return np.asarray(ratio_ECP.sum((0, 2)), dtype=np.float64)


def replay_score(table: TableAttack) -> Score | None:
    """Score the test of a cell with the party's training replayed; None if this plan cannot be replayed."""
    plan, columns = table.plan, {part.shape[1:] for part in table.data.train_features}
    if not can_replay(plan) or len(columns) > 1 or len(next(iter(columns))) > 1:
        return None
    width = next(iter(columns))[0]
    weights = 64 * (width + 64 + plan.embedding_dim) if plan.encoder == "mlp" else width * plan.embedding_dim
    work = plan.num_epochs * plan.num_samples * weights * 6
    games = int(min(400, max(8, _REPLAY_WORK // work)))
    cells = random_cells(table.data, games, np.random.default_rng(table.seed + 3), rows=table.targets)
    found = replay(table.seen, table.data, cells)
    bound = table.bound(Unit.CELL, Accounting.STRICT, SERVER_ALONE)
    return share_right(
        found.all > 0,
        0.5,
        attack="which of two values of a cell, training replayed",
        attacker=SERVER_ALONE,
        setting=table.setting,
        bound=0.5 + bound.advantage_upper_bound / 2,
        bound_words="cell, strict",
    )


# --- recovery ---


def recovery_scores(table: TableAttack) -> list[Score]:
    """Score the recovery of a party's whole cell, by a fitted prior and the likelihood of own releases.

    The prior is a random forest on the label and all other parties' columns, which the attacker knows; networks and
    the other parties' embeddings are known too. Both settings, exact sums and the training's own, share it. Parties
    whose cells have more values than a list of candidates takes are left out.
    """
    embedding_ENMP = table.seen.embedding_ENMP
    targets = table.targets[: _TARGETS // table.plan.num_parties]
    tries = [_recovered(table, embedding_ENMP, targets, party) for party in range(table.plan.num_parties)]
    known = [each for each in tries if each is not None]
    if not known:
        return []
    guess, exact, own = (np.concatenate(each) for each in zip(*known, strict=True))
    bound = table.bound(Unit.CELL, Accounting.PAPER, SERVER_ALONE)
    shared: dict[str, Any] = {"attack": "whole cell recovered", "attacker": SERVER_ALONE}
    return [
        share_right(exact, guess, **shared, setting=table.exact, bound=None, bound_words="nothing is private"),
        share_right(
            own,
            guess,
            **shared,
            setting=table.setting,
            bound=most_right(bound, float(guess.mean())),
            bound_words="cell, own releases",
        ),
    ]


def _recovered(
    table: TableAttack, embedding_ENMP: Array, targets: Array, party: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:
    """Return whether the prior, the attack on exact sums and the attack on the releases find each target's cell."""
    from sklearn.ensemble import RandomForestClassifier

    pbm, parts, labels = table.pbm, data_of(table.data), table.data.train_labels
    values_VD, first, code, counts = np.unique(
        parts[party][table.auxiliary], axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    if len(values_VD) > min(_MOST_VALUES, len(table.auxiliary) // 2):  # numbers rather than categories
        return None
    code = code.reshape(-1)
    others = np.concatenate([labels[:, None], *(part for m, part in enumerate(parts) if m != party)], axis=1)
    forest = RandomForestClassifier(60, random_state=table.seed, n_jobs=1).fit(others[table.auxiliary], code)
    prior_TV = 0.95 * forest.predict_proba(others[targets]) + 0.05 * counts / counts.sum()
    known = {value.tobytes(): v for v, value in enumerate(np.ascontiguousarray(values_VD))}
    truth_T = np.array([known.get(value.tobytes(), -1) for value in np.ascontiguousarray(parts[party][targets])])
    # A candidate's embeddings are those of an auxiliary row with this value. Weights move within an epoch, so the same
    # value has other embeddings in another round: auxiliary rows say how far apart they are.
    bits = pbm.num_trials
    p_ENP = probabilities(pbm, embedding_ENMP[:, table.auxiliary, party])
    q_EVP = p_ENP[:, first]
    drift_E1P = bits**2 * ((p_ENP - q_EVP[:, code]) ** 2).mean(1, keepdims=True) + 1e-9
    p_ETMP = probabilities(pbm, embedding_ENMP[:, targets])
    rest_ETP = bits * (p_ETMP.sum(2) - p_ETMP[:, :, party])
    variance_ETP = bits * (p_ETMP * (1 - p_ETMP)).sum(2)
    counts_ETP = draw_counts(pbm, embedding_ENMP[:, targets], np.random.default_rng(table.seed + 4)).sum(2)
    q_VF = bits * q_EVP.transpose(1, 0, 2).reshape(len(values_VD), -1)
    right = []
    for sums_ETP, noise_ETP in ((bits * p_ETMP.sum(2), np.zeros_like(variance_ETP)), (counts_ETP, variance_ETP)):
        left_TF = (sums_ETP - rest_ETP).transpose(1, 0, 2).reshape(len(targets), -1)
        inverse_TF = (1 / (noise_ETP + drift_E1P)).transpose(1, 0, 2).reshape(len(targets), -1)
        log_TV = (left_TF * inverse_TF) @ q_VF.T - 0.5 * inverse_TF @ (q_VF**2).T
        right.append((log_TV + np.log(prior_TV)).argmax(1) == truth_T)
    return prior_TV.argmax(1) == truth_T, right[0], right[1]


def column_scores(table: TableAttack) -> list[Score]:
    """Score a learned decoder of all columns that have few values, by a server without the networks."""
    parts, labels = data_of(table.data), table.data.train_labels
    whole = np.concatenate(parts, axis=1)
    few = [d for d in range(whole.shape[1]) if len(np.unique(whole[table.auxiliary, d])) <= 8]
    if not few:
        return []
    values = [np.unique(whole[table.auxiliary, d]) for d in few]
    target = indicators(whole[:, few], values)
    targets = table.targets[:_TARGETS]
    classes = np.eye(table.plan.num_classes)[labels]
    by_label = np.stack(
        [target[table.auxiliary][labels[table.auxiliary] == k].mean(0) for k in range(table.plan.num_classes)]
    )
    guess = columns_right(by_label[labels[targets]], whole[targets][:, few], values)
    embedding_ENMP = table.seen.embedding_ENMP
    found = []
    for setting, seen_ENP in ((table.exact, embedding_ENMP.sum(2)), (table.setting, table.seen.estimate_ENP)):
        seen = np.concatenate([seen_ENP.transpose(1, 0, 2).reshape(len(labels), -1), classes], axis=1)
        decoded = decode(seen[table.auxiliary], target[table.auxiliary], seen[targets], seed=table.seed)
        right = columns_right(decoded.value_ND, whole[targets][:, few], values)
        found.append(
            share_right(
                right,
                guess,
                attack="columns decoded, networks unknown",
                attacker=SERVER_ALONE,
                setting=setting,
                bound=None,
                bound_words="several columns at once: no single bound",
            )
        )
    return found


def indicators(whole: Array, values: list[Array]) -> npt.NDArray[np.float64]:
    """Return for each column and each of its values whether a row has it, side by side."""
    return np.concatenate([whole[:, d, None] == own for d, own in enumerate(values)], axis=1).astype(float)


def columns_right(scores: Array, truth: Array, values: list[Array]) -> npt.NDArray[np.float64]:
    """Return each row's share of columns that are right by the largest score among a column's values."""
    start, right = 0, np.zeros(len(truth))
    for d, own in enumerate(values):
        said = own[scores[:, start : start + len(own)].argmax(1)]
        right += said == truth[:, d]
        start += len(own)
    return right / len(values)

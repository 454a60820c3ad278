"""The paper's algorithms in one file are an oracle for the federation: equal without noise, equal in law with it.

Each statistical test raises a false alarm at most once in 1e9 runs; `statistical` has the rates and their reasons.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pbmvfl
from pbmvfl import reference
from pbmvfl.training.encoders import Bounded
from support import statistical
from support.federation_runs import JOINT, Wire, weights
from support.statistical import NUM_DRAWS

SOURCE = Path(reference.__file__)
ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TOLERANCE = 1e-6


# --- the file ---


def test_the_reference_can_be_read_in_one_sitting():
    assert len(SOURCE.read_text().splitlines()) <= 150


def test_the_reference_shares_no_code_with_the_package():
    found = set()
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module)
    typing_only = {"__future__", "collections.abc"}
    assert found - typing_only == {"numpy", "numpy.typing", "torch", "torch.nn.functional"}


#: Lines and steps that do something: the others open or close a loop, or hold a comment.
LINES = {
    "Algorithm 1": {1, 2, 3, 4},
    "Protocol 0": {1, 2, 3, 4},
    "Algorithm 2": {1, 2, 3, 6, 9, 10, 11, 13, 16, 17, 18},
}
_MARKER = re.compile(r"(Algorithm [12]|Protocol 0), (?:line|step)s? (\d+)(?: (and|to) (\d+))?")


def marked_lines(text: str) -> dict[str, set[int]]:
    """Lines of the paper that comments name, such as "Algorithm 2, line 6" or "Algorithm 2, lines 16 to 18"."""
    found: dict[str, set[int]] = {name: set() for name in LINES}
    for name, first, between, last in _MARKER.findall(text):
        end = int(last or first)
        found[name] |= set(range(int(first), end + 1)) if between == "to" else {int(first), end}
    return found


def test_every_line_of_the_paper_is_marked_in_the_reference_and_in_the_package():
    others = [path for path in SOURCE.parent.rglob("*.py") if path != SOURCE]
    in_package = marked_lines("\n".join(path.read_text() for path in others))
    assert in_package == LINES
    in_reference = marked_lines(SOURCE.read_text())
    assert all(lines <= in_reference[name] for name, lines in LINES.items())


def test_the_reader_of_markers_knows_their_three_forms():
    found = marked_lines(
        "# Algorithm 2, line 6\n# Algorithm 2, lines 16 to 18.\nProtocol 0, steps 2 and 4, Algorithm 3, line 1"
    )
    assert found == {"Algorithm 1": set(), "Protocol 0": {2, 4}, "Algorithm 2": {6, 16, 17, 18}}


def test_the_code_of_the_page_about_it_runs(capsys):
    page = (ROOT / "docs" / "how-to" / "pbm-vfl.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    exec(compile(code, "docs/how-to/pbm-vfl.md", "exec"), {"__name__": "__main__"})
    assert (found := re.fullmatch(r"loss (\d\.\d\d) -> (\d\.\d\d)\n", capsys.readouterr().out))
    assert float(found[2]) < float(found[1])


# --- the page that maps the paper to the package ---

_PLACE = re.compile(r"`(src/pbmvfl/[\w/]+\.py)`((?:[:,] `[\w.]+`)*)")


def page_rows() -> list[tuple[str, set[int], str, str]]:
    """(algorithm, lines, file, function) of every function that a table of docs/how-to/pbm-vfl.md names."""
    found, algorithm = [], ""
    for line in (ROOT / "docs" / "how-to" / "pbm-vfl.md").read_text().splitlines():
        if heading := re.match(r"## (Algorithm \d|Protocol \d|)", line):
            algorithm = heading[1]
        elif algorithm and (row := re.match(r"\| ([\d, ]+) \|", line)):
            numbers = {int(number) for number in row[1].split(",")}
            (place,) = _PLACE.findall(line)
            found += [(algorithm, numbers, place[0], name) for name in re.findall(r"[\w.]+", place[1])]
    return found


def source_of(path: Path, dotted: str) -> str:
    """The text of a function or of a class's method; fails if the file has none of that name."""
    text = path.read_text()
    node: Any = ast.parse(text)
    for name in dotted.split("."):
        (node,) = [each for each in node.body if getattr(each, "name", "") == name]
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])  # with a comment behind the last statement


def test_the_page_names_a_function_for_every_line_and_the_function_says_so_too():
    rows = page_rows()
    named: dict[str, set[int]] = {name: set() for name in LINES}
    for algorithm, numbers, path, function in rows:
        assert numbers <= marked_lines(source_of(ROOT / path, function))[algorithm], f"{path}: {function}"
        named[algorithm] |= numbers
    assert named == LINES


def test_every_path_of_the_package_on_the_page_exists():
    paths = [path for path, _ in _PLACE.findall((ROOT / "docs" / "how-to" / "pbm-vfl.md").read_text())]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).is_file()] == []


# --- what the public seed says, by the definitions alone ---

SCHEDULE, WEIGHTS = 1, 3


def public_words(count: int, *, seed: int, stream: int, index: int) -> np.ndarray:
    return np.random.Philox(key=np.array([seed, (stream << 48) | index], dtype=np.uint64)).random_raw(count)


def shuffled_epochs(plan) -> list[np.ndarray]:
    """Every row once in an epoch, in the order of the epoch's public words; the last batch may be short."""
    found = []
    for epoch in range(plan.num_epochs):
        order = np.argsort(public_words(plan.num_samples, seed=plan.seed, stream=SCHEDULE, index=epoch), kind="stable")
        found += [order[start : start + plan.batch_size] for start in range(0, plan.num_samples, plan.batch_size)]
    return found


class Scaled(nn.Module):
    """tanh into [-C, C]."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, values):
        return self.bound * torch.tanh(values)


def first_network(plan, index: int, layers: Callable[[], list[nn.Module]]) -> nn.Sequential:
    """Layers drawn with torch's generator at the role's public word."""
    word = int(public_words(1, seed=plan.seed, stream=WEIGHTS, index=index)[0]) >> 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(word)
        return nn.Sequential(*layers())


def party_layers(plan, columns: int) -> list[nn.Module]:
    if plan.encoder == "linear":
        return [nn.Linear(columns, plan.embedding_dim), Scaled(plan.bound)]
    assert plan.encoder == "mlp"
    hidden = [nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return [*hidden, nn.Linear(64, plan.embedding_dim), Scaled(plan.bound)]


class Federated:
    """The paper's roles for a plan, at their first weights."""

    def __init__(self, plan, data) -> None:
        self.plan, self.data = plan, data
        self.parties = [
            first_network(plan, index, lambda part=part: party_layers(plan, part.shape[1]))
            for index, part in enumerate(data.train_features)
        ]
        self.server = first_network(plan, plan.num_parties, lambda: [nn.Linear(plan.embedding_dim, plan.num_classes)])

    def train(self, **changes: Any) -> list[float]:
        options = {
            "eta": self.plan.learning_rate,
            "C": self.plan.bound,
            "b": None,
            "rng": np.random.default_rng(0),
            **changes,
        }
        rows = [torch.from_numpy(part) for part in self.data.train_features]
        labels = torch.from_numpy(self.data.train_labels)
        batches = options.pop("batches", None) or shuffled_epochs(self.plan)
        return reference.train(self.server, self.parties, rows, labels, batches, **options)

    def distance(self, checkpoints: Path) -> float:
        """The largest difference between a weight here and the same weight in the roles' own checkpoints."""
        found = weights(checkpoints)
        assert set(found) == {"server", *(f"party-{index}" for index in range(self.plan.num_parties))}
        pairs = []
        for index, party in enumerate(self.parties):
            for name, value in party.state_dict().items():
                pairs.append((value, found[f"party-{index}"][f"model.network.{name}"]))
        for name, value in self.server.state_dict().items():
            pairs.append((value, found["server"][f"model.{name.removeprefix('0.')}"]))
        return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def fitted(plan, data, folder: Path) -> tuple[list[float], Wire]:
    """Train by the package: the loss of every round, and all bytes."""
    federation, losses = pbmvfl.Federation(plan), []
    wire = Wire(federation)
    federation.fit(data, checkpoints=folder, on_round=lambda _, loss, __: losses.append(loss))
    return losses, wire


def largest_gap(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


# --- Algorithm 2 without noise: equal ---


@pytest.mark.parametrize(
    ("num_parties", "choices"),
    [(3, {}), (2, {"encoder": "mlp", "seed": 2**62 + 5}), (5, {"bound": 1.7, "num_epochs": 3})],
    ids=str,
)
def test_without_noise_the_federation_equals_the_reference(num_parties, choices, make_data, make_plan, tmp_path):
    data = make_data(num_parties=num_parties)
    plan = make_plan(data, mechanism="none", learning_rate=0.2, **choices)
    losses, _ = fitted(plan, data, tmp_path)
    roles, untrained = Federated(plan, data), Federated(plan, data)
    assert largest_gap(roles.train(), losses) < TOLERANCE
    assert roles.distance(tmp_path) < TOLERANCE
    assert untrained.distance(tmp_path) > 1e-2  # it did train


@pytest.mark.parametrize("wrong", ["learning rate", "order of the batches", "first weights", "no step of the server"])
def test_the_comparison_without_noise_notices_a_wrong_reference(wrong, data, make_plan, tmp_path, monkeypatch):
    plan = make_plan(data, mechanism="none", learning_rate=0.2)
    fitted(plan, data, tmp_path)
    roles = Federated(plan.replace(seed=8) if wrong == "first weights" else plan, data)
    options: dict[str, Any] = {"batches": shuffled_epochs(plan)}
    if wrong == "learning rate":
        options["eta"] = 0.2002
    elif wrong == "order of the batches":
        options["batches"] = options["batches"][::-1]
    elif wrong == "no step of the server":
        right = reference.descend
        monkeypatch.setattr(reference, "descend", lambda h, *step: None if h is roles.server else right(h, *step))
    roles.train(**options)
    assert roles.distance(tmp_path) > 10 * TOLERANCE


# --- Algorithm 2 with noise: the same steps for the same sums ---


def unpacked(payload: bytes, bits: int, count: int) -> list[int]:
    """Integers as they travel: so many bits each, least significant bit first, without gaps."""
    number = int.from_bytes(payload, "little")
    return [(number >> (bits * i)) % 2**bits for i in range(count)]


def sums_on_the_wire(wire: Wire, plan) -> list[np.ndarray]:
    """Of each joint round, the sum over the parties' masked payloads in the ring that holds every sum, (B, P)."""
    bits = next(k for k in range(1, 33) if 2**k > plan.num_trials * plan.num_parties)
    by_round: dict[int, list[bytes]] = {}
    for number, _, payload in wire.embeddings(JOINT):
        by_round.setdefault(number, []).append(payload)
    found = []
    for number, payloads in sorted(by_round.items()):
        assert len(payloads) == plan.num_parties
        count = len(plan.schedule[number].rows) * plan.embedding_dim
        values = np.array([unpacked(payload, bits, count) for payload in payloads])
        found.append((values.sum(axis=0) % 2**bits).reshape(-1, plan.embedding_dim))
    return found


def given_sums(monkeypatch: pytest.MonkeyPatch, sums: Iterator[np.ndarray], shift: int = 0) -> None:
    """Let line 9 of the reference return these sums instead of its own."""

    def secure_sum(q, *, modulus, rng):
        del rng
        found = next(sums)
        assert q.shape[1:] == found.shape
        assert found.max() < modulus
        return found + shift

    monkeypatch.setattr(reference, "secure_sum", secure_sum)


@pytest.mark.parametrize(
    ("num_parties", "choices"),
    [(3, {}), (2, {"encoder": "mlp", "num_trials": 1}), (5, {"bound": 1.7, "num_trials": 100, "beta": 3 / 16})],
    ids=str,
)
def test_given_the_same_sums_the_federation_takes_the_steps_of_the_reference(
    num_parties, choices, make_data, make_plan, tmp_path, monkeypatch
):
    # Masked payloads, summed here, are all that the reference is told: lines 10 to 18 do the rest.
    data = make_data(num_parties=num_parties)
    plan = make_plan(data, **choices)
    assert plan.secure_aggregation
    losses, wire = fitted(plan, data, tmp_path)
    sums = sums_on_the_wire(wire, plan)
    assert len(sums) == len(losses) == 8
    roles = Federated(plan, data)
    given_sums(monkeypatch, iter(sums))
    assert largest_gap(roles.train(b=plan.num_trials, beta=plan.beta), losses) < TOLERANCE
    assert roles.distance(tmp_path) < TOLERANCE


@pytest.mark.parametrize("wrong", [{"shift": 1}, {"beta": 0.2499}], ids=str)
def test_the_comparison_of_steps_notices_another_sum_and_another_estimate(
    wrong, data, make_plan, tmp_path, monkeypatch
):
    plan = make_plan(data)
    assert plan.beta == 0.25
    _, wire = fitted(plan, data, tmp_path)
    given_sums(monkeypatch, iter(sums_on_the_wire(wire, plan)), shift=wrong.get("shift", 0))
    roles = Federated(plan, data)
    roles.train(b=plan.num_trials, beta=wrong.get("beta", plan.beta))
    assert roles.distance(tmp_path) > 10 * TOLERANCE


def test_with_its_own_noise_the_reference_learns(make_data, make_plan):
    data = make_data(num_samples=400)
    plan = make_plan(data, num_epochs=5)
    losses = Federated(plan, data).train(b=64, beta=0.25)
    assert np.mean(losses[-40:]) < 0.7 * np.mean(losses[:10])


# --- Algorithm 1 and the sum: equal in law ---

B, BETA = 4, Fraction(3, 16)
#: Embeddings of three parties. Success probabilities are whole units of 1/65536, to which the package rounds. Sums are
#: so far from 0 that a beta wrong by 5% escapes a chi-square with probability below 1e-20 (noncentrality above 300).
LAWS = {
    "all at one end": (Fraction(1), Fraction(1), Fraction(1)),
    "all different": (Fraction(1), Fraction(3, 4), Fraction(1, 4)),
    "of both signs": (Fraction(-1), Fraction(-1), Fraction(1, 4)),
}
each_law = pytest.mark.parametrize("law", LAWS)


def poisson_binomial(embeddings: tuple[Fraction, ...], beta: Fraction) -> list[Fraction]:
    """The law of the sum, from the definition, in fractions."""
    total = [Fraction(1)]
    for x in embeddings:
        one = statistical.binomial_pmf(B, Fraction(1, 2) + beta * x)
        longer = [Fraction(0)] * (len(total) + B)
        for (i, p), (j, q) in itertools.product(enumerate(total), enumerate(one)):
            longer[i + j] += p * q
        total = longer
    return total


def counted(sums: np.ndarray) -> np.ndarray:
    return np.bincount(sums.reshape(-1), minlength=3 * B + 1)


def reference_sums(law: str, beta: float) -> np.ndarray:
    rng = np.random.default_rng()
    columns = [np.full(NUM_DRAWS, float(x)) for x in LAWS[law]]
    q = np.stack([reference.quantise(x, b=B, beta=beta, rng=rng) for x in columns])
    return counted(reference.secure_sum(q, modulus=3 * B + 1, rng=rng))


@pytest.fixture(scope="module")
def federation_sums() -> dict[str, np.ndarray]:
    """How often each sum came out of one round of a federation, by law: one coordinate of the embedding each."""
    at_party = np.array([[float(x) for x in law] for law in LAWS.values()], dtype=np.float32).T
    data = pbmvfl.VerticalDataset(
        name="constant",
        party_names=("a", "b", "c"),
        train_features=tuple(np.tile(x, (NUM_DRAWS, 1)) for x in at_party),
        test_features=tuple(np.empty((0, len(LAWS)), dtype=np.float32) for _ in at_party),
        train_labels=np.arange(NUM_DRAWS) % 2,
        test_labels=np.empty(0, dtype=np.int64),
        class_names=("0", "1"),
        default_encoder="linear",
    )
    plan = pbmvfl.Plan.for_data(
        data,
        embedding_dim=len(LAWS),
        num_trials=B,
        beta=float(BETA),
        batch_size=NUM_DRAWS,
        num_epochs=1,
        evaluation="none",
    )
    federation = pbmvfl.Federation(plan, encoders=[unchanged(len(LAWS)) for _ in at_party])
    wire = Wire(federation)
    federation.fit(data)
    sums = bits_of_four(wire, plan)
    return {law: counted(sums[:, column]) for column, law in enumerate(LAWS)}


def unchanged(columns: int) -> nn.Module:
    """A network whose embedding is its row, as long as that lies in [-1, 1]."""
    network = nn.Linear(columns, columns, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.eye(columns))
    return Bounded(network, activation="hardtanh")


def bits_of_four(wire: Wire, plan) -> np.ndarray:
    """`sums_on_the_wire` of the one round, for values of four bits: two in a byte, the low one first."""
    assert 8 <= plan.num_trials * plan.num_parties < 16
    payloads = [np.frombuffer(payload, dtype=np.uint8) for _, _, payload in wire.embeddings(JOINT)]
    assert len(payloads) == plan.num_parties
    values = np.array([np.stack([payload % 16, payload // 16], axis=1).reshape(-1) for payload in payloads])
    return (values.sum(axis=0, dtype=np.int64) % 16).reshape(plan.num_samples, plan.embedding_dim)


@each_law
def test_the_sums_of_the_reference_have_the_exact_law(law):
    observed = reference_sums(law, float(BETA))
    assert observed.sum() == NUM_DRAWS
    assert not statistical.chi_square_rejects(observed, poisson_binomial(LAWS[law], BETA))


@each_law
def test_the_sums_of_the_federation_have_the_exact_law(law, federation_sums):
    observed = federation_sums[law]
    assert observed.sum() == NUM_DRAWS
    assert len(observed) == 3 * B + 1
    assert not statistical.chi_square_rejects(observed, poisson_binomial(LAWS[law], BETA))


@pytest.mark.parametrize("ratio", [Fraction(95, 100), Fraction(105, 100)], ids=str)
@each_law
def test_a_beta_wrong_by_a_twentieth_is_noticed_in_both(law, ratio, federation_sums):
    drawn_wrongly = reference_sums(law, float(BETA * ratio))
    assert statistical.chi_square_rejects(drawn_wrongly, poisson_binomial(LAWS[law], BETA))
    assert statistical.chi_square_rejects(federation_sums[law], poisson_binomial(LAWS[law], BETA * ratio))


@pytest.mark.parametrize("C", [1.0, 0.25, 40.0])
def test_quantised_values_are_binomial_with_the_probability_of_line_2(C):
    drawn = reference.quantise(np.full(NUM_DRAWS, -C * 3 / 4), b=3, beta=0.25, C=C, rng=np.random.default_rng())
    observed = np.bincount(drawn, minlength=4)
    assert not statistical.binomial_law_rejects(observed, 3, Fraction(5, 16))
    # The control, 15 standard deviations away: beta wrong by 5%.
    assert statistical.binomial_law_rejects(observed, 3, Fraction(1, 2) - Fraction(21, 80) * Fraction(3, 4))


@pytest.mark.parametrize(
    "wrong", [{"b": 0}, {"beta": -0.01}, {"beta": 0.26}, {"C": 0.0}, {"x": 1.01}, {"x": math.nan}], ids=str
)
def test_quantise_refuses_what_line_1_does_not_permit(wrong):
    options = {"x": 0.5, "b": 2, "beta": 0.25, "C": 1.0, **wrong}
    with pytest.raises(ValueError, match=r"needs b >= 1, beta in \[0, 1/4\], C > 0 and every x in \[-C, C\]"):
        reference.quantise(options.pop("x"), **options, rng=np.random.default_rng(0))


# --- Protocol 0 ---

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
moduli = st.one_of(st.integers(2, 40), st.integers(2, 2**40), st.integers(1, 40).map(lambda k: 2**k))


@given(M=st.integers(2, 9), shape=shapes, modulus=moduli, seed=st.integers(0, 2**32))
def test_masks_cancel_for_any_party_count_shape_and_modulus(M, shape, modulus, seed):
    rng = np.random.default_rng(seed)
    q = rng.integers(modulus, size=(M, *shape))
    plain = np.array(sum(q.astype(object))) % modulus
    total = reference.secure_sum(q, modulus=modulus, rng=rng)
    assert total.shape == shape
    assert (total == plain).all()


@given(M=st.integers(2, 9), shape=shapes, modulus=moduli, seed=st.integers(0, 2**32), at=st.data())
def test_a_mask_that_one_party_leaves_out_stays_in_the_sum(M, shape, modulus, seed, at):
    rng = np.random.default_rng(seed)
    q, u = rng.integers(modulus, size=(M, *shape)), rng.integers(modulus, size=(M, M, *shape))
    me, peer = at.draw(st.permutations(range(M)))[:2]
    left_out = u.copy()
    left_out[me, peer] = left_out[peer, me] = 0
    y = reference.mask(q, u, modulus=modulus)
    y[me] = reference.mask(q, left_out, modulus=modulus)[me]
    missing = (u[me, peer] - u[peer, me]) % modulus
    assert ((q.sum(axis=0) - y.sum(axis=0)) % modulus == missing).all()
    assert ((y.sum(axis=0) - q.sum(axis=0)) % modulus != 0).tolist() == (missing != 0).tolist()


def test_the_sum_is_taken_of_masked_values(monkeypatch):
    q, right = np.arange(12).reshape(3, 4), reference.mask

    def unmasked_at_the_first_party(q, u, *, modulus):
        return np.concatenate([q[:1], right(q, u, modulus=modulus)[1:]])

    assert reference.secure_sum(q, modulus=2**40, rng=np.random.default_rng(0)).tolist() == [12, 15, 18, 21]
    monkeypatch.setattr(reference, "mask", unmasked_at_the_first_party)
    assert reference.secure_sum(q, modulus=2**40, rng=np.random.default_rng(0)).tolist() != [12, 15, 18, 21]


def laws_of_messages(M: int, size: int, masked: Callable[..., np.ndarray]) -> dict[tuple[int, ...], Counter]:
    """The exact law of all y together, for every q: each u in 0..size-1 once."""
    pairs = [(m, k) for m in range(M) for k in range(M) if m != k]
    draws = np.zeros((size ** len(pairs), M, M), dtype=np.int64)
    for u, values in zip(draws, itertools.product(range(size), repeat=len(pairs)), strict=True):
        for pair, value in zip(pairs, values, strict=True):
            u[pair] = value
    secrets = itertools.product(range(size), repeat=M)
    return {q: Counter(tuple(masked(np.array(q), u).tolist()) for u in draws) for q in secrets}


def differ_at_equal_sums(laws: dict[tuple[int, ...], Counter], total: Callable[[tuple[int, ...]], int]) -> bool:
    first: dict[int, Counter] = {}
    return any(first.setdefault(total(q), law) != law for q, law in laws.items())


@pytest.mark.parametrize(("M", "modulus"), [(2, 2), (2, 5), (3, 2), (3, 3)])
def test_the_masked_values_tell_nothing_but_the_sum(M, modulus):
    laws = laws_of_messages(M, modulus, lambda q, u: reference.mask(q, u, modulus=modulus))
    assert not differ_at_equal_sums(laws, lambda q: sum(q) % modulus)
    assert differ_at_equal_sums(laws, lambda _: 0)  # the sum they do tell
    for law in laws.values():
        alone = Counter(y[0] for y in law.elements())
        assert set(alone) == set(range(modulus))
        assert len(set(alone.values())) == 1  # a party's value by itself is uniform


def test_over_the_integers_the_masked_values_tell_more_than_the_sum():
    # The control, and the reason for a modulus: as printed, nothing wraps around.
    laws = laws_of_messages(2, 3, lambda q, u: q + (u - u.T).sum(axis=1))
    assert differ_at_equal_sums(laws, sum)

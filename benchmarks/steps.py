"""Step of a party and whole round, with and without privacy, and against a plain loop."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.measure import Row, alternate
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.crypto.key_exchange import Identity, KeyExchange, Session
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, deliver
from pbmvfl.training.encoders import build_encoder, build_head
from pbmvfl.training.updates import Noisy, Plain, Update
from pbmvfl.wire.messages import SERVER, Hello, Message, MessageKind

ENDLESS = 1 << 20


def activity_plan(**choices: object) -> Plan:
    return Plan.from_dict(
        {"num_parties": 5, "num_samples": 7352, "num_classes": 6, "num_epochs": ENDLESS // 74, "beta": 0.25, **choices}
    )


def modelnet_plan(**choices: object) -> Plan:
    return Plan.from_dict(
        {
            "num_parties": 12,
            "num_samples": 1008,
            "num_classes": 10,
            "embedding_dim": 4096,
            "batch_size": 63,  # all batches alike: 1008 = 16 * 63
            "num_epochs": 1000,
            "beta": 0.15,
            "encoder": "multiview-conv",
            **choices,
        }
    )


def open_party(plan: Plan, features: np.ndarray) -> tuple[Party, Session]:  # type: ignore[type-arg]
    """Return party 1 of the plan after a real handshake with peers that exist only as keys."""
    identities = [Identity.generate() for _ in range(plan.num_parties)]
    party = Party(
        plan,
        index=1,
        train_features=features,
        encoder=build_encoder(plan, index=1, input_shape=features.shape[1:]),
        identity=identities[1],
        identities=[identity.public for identity in identities],
    )
    nonces = [bytes([i]) * 32 for i in range(plan.num_parties)]
    start = Message(MessageKind.START, SERVER, run_id=b"benchmrk", payload=plan.hash).to_bytes()
    nonces[1] = Hello.from_bytes(Message.from_bytes(party.answer(start)).payload).nonce
    session = Session.open(plan_hash=plan.hash, run_id=b"benchmrk", nonces=nonces)

    def from_server(kind: MessageKind, payload: bytes) -> bytes:
        return Message(kind, SERVER, run_id=session.run_id, session_id=session.id, payload=payload).to_bytes()

    own = bytes(Message.from_bytes(party.answer(from_server(MessageKind.NONCES, plan.hash + b"".join(nonces)))).payload)
    keys = [
        own if i == 1 else KeyExchange(session=session, index=i, identity=identity).signed_key.to_bytes()
        for i, identity in enumerate(identities)
    ]
    party.answer(from_server(MessageKind.KEYS, b"".join(keys)))
    return party, session


def party_step(plan: Plan, features: np.ndarray) -> Callable[[], object]:  # type: ignore[type-arg]
    """Return a function that makes one exchange: last round's gradient in, next round's masked embedding out."""
    party, session = open_party(plan, features)
    schedule, rounds = plan.schedule, itertools.count()
    values = np.random.default_rng(0).normal(scale=1e-4, size=(plan.batch_size, plan.embedding_dim)).astype(np.float32)

    def step() -> object:
        number = next(rounds)
        before = b"" if number == 0 else values[: schedule.num_rows(number - 1)].tobytes()
        return party.answer(
            Message(
                MessageKind.ROUND,
                SERVER,
                run_id=session.run_id,
                session_id=session.id,
                round_number=number,
                round_kind=1,
                carries_gradient=number > 0,
                payload=before,
            ).to_bytes()
        )

    return step


def privacy_in_a_step() -> Iterator[Row]:
    """Measure what quantising, masking and packing add to a party's own step."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(7352, 112)).astype(np.float32)
    for num_trials, limit in ((2, 15), (16, 15), (64, 25), (128, 35)):
        private = party_step(activity_plan(num_trials=num_trials), features)
        plain = party_step(activity_plan(mechanism="none"), features)
        ratio, slow, fast = alternate(private, plain, calls=10)
        detail = f"{slow * 1e6:.0f} against {fast * 1e6:.0f} us"
        yield Row(f"privacy in a party's step, Activity, b={num_trials}", (ratio - 1) * 100, limit, "%", detail=detail)
    views = generator.integers(0, 256, size=(1008, 1, 32, 32)).astype(np.uint8)
    for num_trials in (2, 16):
        private = party_step(modelnet_plan(num_trials=num_trials), views)
        plain = party_step(modelnet_plan(mechanism="none"), views)
        ratio, slow, fast = alternate(private, plain, calls=1, blocks=15)
        detail = f"{slow * 1e3:.1f} against {fast * 1e3:.1f} ms"
        yield Row(f"privacy in a party's step, ModelNet, b={num_trials}", (ratio - 1) * 100, 6, "%", detail=detail)


def noise_on_updates() -> Iterator[Row]:
    """Measure what clipping every row's gradient and exact noise on the sum cost in a party's step."""
    features = np.random.default_rng(0).normal(size=(7352, 112)).astype(np.float32)
    for rows in (1000, 100):
        sizes = {"num_trials": 16, "batch_size": rows, "num_epochs": 10_000}
        noisy = party_step(activity_plan(**sizes, noise_multiplier=4.0), features)
        plain = party_step(activity_plan(**sizes), features)
        ratio, slow, fast = alternate(noisy, plain, calls=4, blocks=101)
        detail = f"{slow * 1e6:.0f} against {fast * 1e6:.0f} us"
        # With few rows it is mostly the noise, which there is one draw of for every weight.
        limit = 1.5 if rows == 1000 else 3
        yield Row(f"noisy update, mlp 112-64-64-16, batch {rows}: times a plain step", ratio, limit, "x", detail=detail)


def dense_steps() -> Iterator[Row]:
    """Time a network's own step, without the protocol around it, against autograd and against Opacus's hooks."""
    generator = np.random.default_rng(0)
    for rows, limit in ((100, 0.7), (1000, 0.8)):  # the more rows, the more of it is matrix products on either side
        plan = activity_plan(batch_size=rows)
        written_out, by_autograd = Plain(plan, activity_encoder(plan)), Plain(plan, activity_encoder(plan))
        by_autograd._dense = None
        data = generator.normal(size=(rows, 112)), generator.normal(scale=1e-4, size=(rows, plan.embedding_dim))
        ours, theirs = update_step(written_out, *data), update_step(by_autograd, *data)
        ratio, fast, slow = alternate(ours, theirs, calls=8)
        detail = f"{fast * 1e6:.0f} against {slow * 1e6:.0f} us"
        yield Row(f"plain step, mlp 112-64-64-16, batch {rows}: times autograd's", ratio, limit, "x", detail=detail)
    try:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:  # the extra `bench` has it
        return
    plan = activity_plan(batch_size=1000, noise_multiplier=4.0)
    data = generator.normal(size=(1000, 112)), generator.normal(scale=1e-4, size=(1000, plan.embedding_dim))
    batch, gradient = (torch.from_numpy(each.astype(np.float32)) for each in data)
    hooked = GradSampleModule(activity_encoder(plan))
    optimizer = DPOptimizer(
        torch.optim.SGD(hooked.parameters(), lr=plan.learning_rate),
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.clip_norm,
        expected_batch_size=1000,
    )

    # It fires where no input has a gradient, as is always so for the first layer.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def opacus_step() -> None:
        hooked(batch).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    ratio, slow, fast = alternate(opacus_step, update_step(Noisy(plan, activity_encoder(plan)), *data), calls=2)
    detail = f"{slow * 1e6:.0f} against {fast * 1e6:.0f} us"
    yield Row("noisy step, batch 1000: times the speed of Opacus's hooks", ratio, 3, "x", False, detail)


def activity_encoder(plan: Plan) -> nn.Module:
    return build_encoder(plan, index=0, input_shape=(112,))


def update_step(update: Update, features: np.ndarray, gradient: np.ndarray) -> Callable[[], object]:  # type: ignore[type-arg]
    """Return a function that embeds a batch and steps along a gradient."""
    batch, given, entropy = torch.from_numpy(features.astype(np.float32)), gradient.astype(np.float32), SystemEntropy()

    def step() -> None:
        update.embed(batch, for_training=True)
        update.apply(given, entropy)

    return step


class Round:
    """Round of the whole federation in this process, one per call."""

    def __init__(
        self,
        plan: Plan,
        features: list[np.ndarray],  # type: ignore[type-arg]
        labels: np.ndarray,  # type: ignore[type-arg]
        ledgers: Path | None = None,
    ) -> None:
        identities = [Identity.generate() for _ in range(plan.num_parties)]
        pinned = tuple(identity.public for identity in identities)
        setups = [
            PartySetup(
                plan=plan,
                index=i,
                identity=identities[i].private_bytes(),
                identities=pinned,
                train_features=features[i],
                test_features=None,
                ledger=None if ledgers is None else ledgers / f"{i}.sqlite",
                dataset="benchmark",
                exact_metrics=True,  # as the plan says, though none is read
            )
            for i in range(plan.num_parties)
        ]
        self._transport = InProcess(setups)
        self._server = Server(plan, train_labels=labels)
        self._meter = Meter()
        while not self._server.is_open:
            self._pass_on()

    def _pass_on(self) -> bytes:
        message = self._server.advance()
        assert message is not None
        deliver(self._server, self._transport, self._meter, message, setup=False)
        return message

    def __call__(self) -> None:
        if Message.from_bytes(self._pass_on()).kind is MessageKind.UPDATE:  # the end of an epoch: a gradient alone
            self._pass_on()


class PlainLoop:
    """Plain loop of the same training: every party's network runs twice, and torch draws the binomials."""

    def __init__(self, plan: Plan, features: list[np.ndarray], labels: np.ndarray) -> None:  # type: ignore[type-arg]
        self._plan = plan
        self._features = [torch.from_numpy(part) for part in features]
        self._labels = torch.from_numpy(labels)
        self._encoders = [build_encoder(plan, index=i, input_shape=part.shape[1:]) for i, part in enumerate(features)]
        self._head: nn.Module = build_head(plan)
        networks = [*self._encoders, self._head]
        self._optimizers = [torch.optim.SGD(network.parameters(), lr=plan.learning_rate) for network in networks]
        self._rounds = itertools.count()
        self._schedule = plan.schedule

    def __call__(self) -> None:
        plan = self._plan
        rows = torch.from_numpy(self._schedule[next(self._rounds)].rows.copy())
        total = torch.zeros(len(rows), plan.embedding_dim)
        for encoder, features in zip(self._encoders, self._features, strict=True):
            with torch.no_grad():
                probability = 0.5 + plan.beta * encoder(features[rows])
                total += torch.distributions.Binomial(plan.num_trials, probability).sample()
        estimate = (total - plan.num_trials * plan.num_parties / 2) / (plan.beta * plan.num_trials)
        estimate.requires_grad_()
        loss = functional.cross_entropy(self._head(estimate), self._labels[rows])
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        for encoder, features in zip(self._encoders, self._features, strict=True):
            encoder(features[rows]).backward(estimate.grad)
        for optimizer in self._optimizers:
            optimizer.step()


def whole_rounds() -> Iterator[Row]:
    generator = np.random.default_rng(0)
    features = [generator.normal(size=(7352, 112)).astype(np.float32) for _ in range(5)]
    labels = generator.integers(0, 6, size=7352).astype(np.int64)
    plan = activity_plan(num_trials=16)
    private, clear = (
        Round(plan, features, labels),
        Round(plan.replace(mechanism="none", secure_aggregation=None), features, labels),
    )
    ratio, slow, fast = alternate(private, clear, calls=4)
    detail = f"{slow * 1e3:.2f} against {fast * 1e3:.2f} ms"
    yield Row("whole round, 5 parties, b=16: times mechanism none", ratio, 1.35, "x", detail=detail)
    plain = PlainLoop(plan, features, labels)
    ratio, slow, fast = alternate(plain, private, calls=3)
    detail = f"{100 / fast:,.0f} against {100 / slow:,.0f} rows/s"
    yield Row("whole round, 5 parties, b=16: times a plain loop's speed", ratio, 3, "x", False, detail)


def ledgers() -> Iterator[Row]:
    """Measure what the ledgers of all parties add to a round, without and with a limit to keep."""
    generator = np.random.default_rng(0)
    features = [generator.normal(size=(7352, 112)).astype(np.float32) for _ in range(5)]
    labels = generator.integers(0, 6, size=7352).astype(np.int64)
    plan = activity_plan(num_trials=16)
    without = Round(plan, features, labels)
    for name, epsilon in (("no limit", None), ("one limit", 1e9)):
        with tempfile.TemporaryDirectory() as folder:
            for party in range(plan.num_parties):
                ledger = Ledger(Path(folder) / f"{party}.sqlite")
                if epsilon is not None:
                    limit = Limit.choose(unit="cell", accounting="paper", epsilon=epsilon, delta=1e-5)
                    ledger.set_limit("benchmark", limit)
                ledger.close()
            charged = Round(plan, features, labels, Path(folder))
            ratio, slow, fast = alternate(charged, without, calls=4, blocks=301)
        detail = f"{slow * 1e3:.2f} against {fast * 1e3:.2f} ms"
        yield Row(f"ledgers of 5 parties in a round, {name}", (ratio - 1) * 100, 5, "%", detail=detail)

"""What the tests share: one thread, small aligned tables, roles driven by hand, counter mode by its definition."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
# Ledgers keep a counter outside of them: in a folder of this test run alone, also in the processes that it starts.
os.environ["PBMVFL_STATE"] = tempfile.mkdtemp(prefix="pbmvfl-state-")

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The release monitor is imported before anything of the product; processes that tests start find it on their path.
os.environ["PBMVFL_TEST_VIOLATIONS"] = os.path.join(os.environ["PBMVFL_STATE"], "violations")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).resolve().parent / "monitored"), os.environ.get("PYTHONPATH")))
)
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import settings

import release_monitor
from known_randomness import TwinSetup
from pbmvfl.cli import main
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.server import Server

atexit.register(shutil.rmtree, os.environ["PBMVFL_STATE"], ignore_errors=True)
torch.set_num_threads(1)
# Compilation on first use would trip any deadline. Where CI is set the examples are the same every time, so that a
# change is judged by itself; everywhere else each run looks at new ones.
settings.register_profile("pbmvfl", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("pbmvfl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first: a file is one process's (`--dist loadfile`), and the last one should be
    short."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(autouse=True)
def _one_release_for_one_charge(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test, whatever it is about, in which a party released more than was charged."""
    yield
    found = release_monitor.violations()
    if request.node.get_closest_marker("releases_uncharged") is None:
        assert not found, found


@pytest.fixture(autouse=True)
def _arithmetic_as_it_was() -> Iterator[None]:
    """A job's process has numbers near zero flushed; where tests run one as a thread, others must not inherit that."""
    yield
    torch.set_flush_denormal(False)


def small_data(
    *, num_parties: int = 3, num_samples: int = 37, num_test_samples: int = 13, num_classes: int = 3, columns: int = 4
) -> VerticalDataset:
    """A table that can be learned: the class moves every party's columns a little."""
    random = np.random.default_rng(12345)
    rows = num_samples + num_test_samples
    labels = random.integers(0, num_classes, rows)
    centres = random.normal(size=(num_classes, num_parties, columns))
    features = (centres[labels] + 0.5 * random.normal(size=(rows, num_parties, columns))).astype(np.float32)
    return VerticalDataset(
        name="small",
        party_names=tuple(f"party-{index}" for index in range(num_parties)),
        train_features=tuple(np.ascontiguousarray(features[:num_samples, m]) for m in range(num_parties)),
        test_features=tuple(np.ascontiguousarray(features[num_samples:, m]) for m in range(num_parties)),
        train_labels=labels[:num_samples].astype(np.int64),
        test_labels=labels[num_samples:].astype(np.int64),
        class_names=tuple(f"class-{index}" for index in range(num_classes)),
        default_encoder="linear",
    )


def small_plan(data: VerticalDataset, **choices: Any) -> Plan:
    """Two epochs with a short last batch."""
    usual = {"batch_size": 10, "num_epochs": 2, "embedding_dim": 3, "num_trials": 5, "learning_rate": 0.1, "seed": 7}
    return Plan.for_data(data, **{**usual, **choices})


class Cohort:
    """A server and its parties driven by hand. Randomness is known, so that two of them are twins to the byte."""

    def __init__(self, plan: Plan, data: VerticalDataset, *, head: torch.nn.Module | None = None) -> None:
        self.plan = plan
        identities = [Identity.from_private_bytes(bytes([100 + index]) * 32) for index in range(plan.num_parties)]
        self.pinned = tuple(identity.public for identity in identities)
        self.server = Server(plan, train_labels=data.train_labels, run_id=b"run-0001", head=head)
        self.parties = [
            TwinSetup(
                plan=plan,
                index=index,
                identity=identity.private_bytes(),
                identities=self.pinned,
                train_features=data.train_features[index],
                test_features=data.test_features[index],
            ).build()
            for index, identity in enumerate(identities)
        ]
        #: (direction, party, message) in the order of the wire.
        self.transcript: list[tuple[str, int, bytes]] = []

    def run(
        self,
        *,
        until: Callable[[bytes], bool] = lambda _: False,
        before_party: Callable[[Party, bytes], None] = lambda *_: None,
        after_party: Callable[[Party, bytes, bytes], None] = lambda *_: None,
        before_server: Callable[[Server, bytes], None] = lambda *_: None,
        after_server: Callable[[Server, bytes], None] = lambda *_: None,
    ) -> bytes | None:
        """Run to the end, or to the first message of the server for which `until` holds, which is not delivered."""
        while True:
            message = self.server.advance()
            if message is None or until(message):
                return message
            answers = []
            for index, party in enumerate(self.parties):
                before_party(party, message)
                answer = party.answer(message)
                after_party(party, message, answer)
                self.transcript.append(("down", index, message))
                if answer:
                    answers.append(answer)
            for index, answer in enumerate(answers):
                before_server(self.server, answer)
                self.server.receive(answer)
                after_server(self.server, answer)
                self.transcript.append(("up", index, answer))


@pytest.fixture(scope="session")
def make_data() -> Callable[..., VerticalDataset]:
    return small_data


@pytest.fixture(scope="session")
def data() -> VerticalDataset:
    return small_data()


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return small_plan


@pytest.fixture(scope="session")
def make_cohort() -> Callable[..., Cohort]:
    return Cohort


@pytest.fixture(scope="session")
def counter_mode() -> Callable[..., bytes]:
    """AES-256 in counter mode by its definition: each counter block encrypted by itself (NIST SP 800-38A, 6.5)."""

    def stream(key: bytes, num_bytes: int, *, first_block: int = 0) -> bytes:
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        blocks = range(first_block, first_block - (-num_bytes // 16))
        return b"".join(cipher.update(block.to_bytes(16, "big")) for block in blocks)[:num_bytes]

    return stream


@pytest.fixture(scope="session")
def run_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, or another program, in a Python process of its own that starts in the folder `cwd`.

    The timeout ends a process that hangs; it is no statement about speed.
    """

    def run(
        *arguments: object, cwd: Path, program: str = "from pbmvfl.cli import main; main()", timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pbmvfl", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)  # as Python does
        return code, *capsys.readouterr()

    return run

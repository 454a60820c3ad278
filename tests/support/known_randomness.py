"""Known bytes instead of secret ones, for known-answer tests. A run that uses them claims no privacy, and says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pbmvfl.crypto.entropy import Entropy, Zeros, fast_keystream
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Keeper, Party, ReleaseGuard


class SeededEntropy:
    """The stream of a seed that everybody knows."""

    seeded = True

    def __init__(self, seed: bytes) -> None:
        self._zeros = Zeros()
        self._stream = fast_keystream(seed.ljust(32, b"\0")[:32])

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        raw = buffer.data.cast("B")
        self._stream.update_into(self._zeros(len(raw)), raw)


def known_secret(entropy: SeededEntropy) -> Callable[[int], bytes]:
    """What stands in for os.urandom."""

    def draw(count: int) -> bytes:
        buffer = np.empty(count, dtype=np.uint8)
        entropy.fill(buffer)
        return buffer.tobytes()

    return draw


class KnownParty(Party):
    """A party whose noise and keys follow from a seed."""

    def seed_with(self, seed: bytes) -> None:
        known = hashlib.sha256(seed + self.index.to_bytes(2, "big")).digest()
        noise, secrets = (SeededEntropy(hashlib.sha256(use + known).digest()) for use in (b"noise", b"secret"))
        self._entropy, self._secret = noise, known_secret(secrets)

    # --- what its owner could do by the constructor's arguments, after it was made ---

    @property
    def noise(self) -> Entropy:
        """Stream that its noise is drawn from."""
        return self._entropy

    def open_guard_with(self, open_guard: Callable[..., ReleaseGuard]) -> None:
        self._open_guard = open_guard

    def guard_with(self, guard: ReleaseGuard) -> None:
        """Pass every release by this guard, from now on."""
        self._open_guard, self._guard = (lambda *_: guard), guard

    def keep_with(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def kept_state(self) -> dict[str, Tensor]:
        """Return what a checkpoint would hold now."""
        return self._kept_state()


class KnownSetup(PartySetup):
    """Makes such parties, also in a process of its own. Subclasses have the seed."""

    seed: ClassVar[bytes] = b"known"

    def build(self, encoder: nn.Module | None = None) -> KnownParty:
        party = super().build(encoder)
        assert isinstance(party, KnownParty)
        return party

    def make_party(self, plan: Plan, **arguments: Any) -> KnownParty:
        party = KnownParty(plan, **arguments)
        party.seed_with(self.seed)
        return party


class SameSetup(KnownSetup):
    seed: ClassVar[bytes] = b"the same"


class TwinSetup(KnownSetup):
    seed: ClassVar[bytes] = b"twins"


class KnownFederation(Federation):
    """Runs that send the same bytes whenever they are run."""

    setup_kind: ClassVar[type[PartySetup]] = KnownSetup
    noise_is_seeded = True

    def new_run_id(self) -> bytes:
        return getattr(self.setup_kind, "seed", b"").ljust(8, b"\0")[:8]

    def new_identity(self, index: int) -> Identity:
        return Identity.from_private_bytes(bytes([index + 1]) * 32)


def known_federation(plan: Plan, *, setup_kind: type[KnownSetup] = KnownSetup, **arguments: Any) -> KnownFederation:
    """A federation with the randomness of this setup."""
    federation = KnownFederation(plan, **arguments)
    federation.setup_kind = setup_kind  # type: ignore[misc]  # of this one object alone
    return federation

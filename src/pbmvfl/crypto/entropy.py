"""The only source of secret randomness.

AES-256 in counter mode under a key from the operating system. There is no seed argument and no way to copy or save
the state; a forked child gets a fresh key before it can draw anything. Schedule, first weights and the gradient
codec's rounding are public and come from elsewhere (`pbmvfl.crypto.public_streams.public_bits`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # imported at the first use: a simulation draws no secret bytes, and runs without the package
    from cryptography.hazmat.primitives.ciphers import CipherContext

#: A key is replaced after this many bytes: half of what GCM's 32-bit block counter allows.
BYTES_PER_KEY = 1 << 35

_generation = 0


def _new_generation() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_new_generation)


def fork_generation() -> int:
    """Return the number of forks between this process and the first.

    A secret that was made at another number is known to a parent process too.
    """
    return _generation


class Entropy(Protocol):
    """Source of secret random bytes for a mechanism."""

    #: True if the bytes may be known to another than their owner. A run that used such noise has epsilon = infinity.
    seeded: bool

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        """Overwrite the whole (contiguous) buffer with random bytes."""


def keystream(key: bytes, *, first_block: int = 0) -> CipherContext:
    """Return AES-256-CTR as an encryptor; encrypting zeros gives the stream.

    Args:
        key: 32 bytes.
        first_block: Number of the 16-byte block that the stream begins with.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.CTR(first_block.to_bytes(16, "big"))).encryptor()


def fast_keystream(key: bytes) -> CipherContext:
    """Return the AES-256-CTR stream of `keystream` from block 2 on, at up to twice the speed, but without seeking.

    GCM encrypts in counter mode starting at block nonce || 2, so with a zero nonce its ciphertext of zeros is that
    stream. OpenSSL has wide-vector code for GCM and none for plain CTR. The tag is never used.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()


class Zeros:
    """Run of zero bytes, grown as needed: the plaintext that turns a cipher into a stream."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytes(1 << 16))

    def __call__(self, count: int) -> memoryview:
        if count > len(self._bytes):
            self._bytes = memoryview(bytes(count))
        return self._bytes[:count]


class SystemEntropy:
    """Secret randomness for deployments and simulations alike."""

    seeded = False

    def __init__(self) -> None:
        self._zeros = Zeros()
        self._generation = -1
        self._left = 0
        self._rekey()

    def _rekey(self) -> None:
        self._stream = fast_keystream(os.urandom(32))
        self._generation = _generation
        self._left = BYTES_PER_KEY

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        raw = buffer.data.cast("B")
        if self._generation != _generation or self._left < len(raw):
            self._rekey()
        self._left -= len(raw)
        self._stream.update_into(self._zeros(len(raw)), raw)

    def __reduce__(self) -> NoReturn:
        raise TypeError("secret randomness cannot be copied or sent to another process; make a new one there")


def standard_normal(entropy: Entropy, count: int) -> npt.NDArray[np.float64]:
    """Draw normal deviates by inversion of 53-bit uniforms.

    For baselines: floating point, not a proof-grade sampler.
    """
    from scipy.special import ndtri

    words = np.empty(count, dtype=np.uint64)
    entropy.fill(words)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(ndtri(uniform), dtype=np.float64)

"""Random bytes of the attacker's own, from an ordinary generator: reproducible by a seed, and no secret.

They have the interface of the parties' source, so that the parties' own samplers can be run on them. A release needs
secret bytes; what is drawn from these is made up, and no ledger has to count it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class MadeUpEntropy:
    """Bytes of numpy's generator.

    Args:
        seed: Anything that `numpy.random.default_rng` takes.
    """

    seeded = True

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        """Overwrite the whole (contiguous) buffer."""
        buffer.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._random.bytes(buffer.nbytes), dtype=np.uint8)

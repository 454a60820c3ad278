"""Parties as objects of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.round_kinds import Split
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.transport import Answers

#: From so many rows in a batch on, parties compute at the same time: their loops release the interpreter's lock.
_LARGE_BATCH = 1 << 14
_Found = TypeVar("_Found")


class InProcess:
    """Transport that calls the parties of this process. A call cannot be cut, so there is no timeout.

    One party after the other, unless batches are large. Own networks are never called at the same time: they may share
    what they compute with.
    """

    def __init__(self, setups: Sequence[PartySetup], encoders: Sequence[nn.Module] | None = None) -> None:
        own = encoders if encoders is not None else [None] * len(setups)
        self.parties: list[Party] = []
        with contextlib.ExitStack() as made:  # if a later one cannot be made, the earlier ones hold nothing
            for setup, encoder in zip(setups, own, strict=True):
                self.parties.append(setup.build(encoder))
                made.callback(self.parties[-1].close)
            made.pop_all()
        large = all(each.plan.schedule.largest_batch >= _LARGE_BATCH for each in setups)
        #: Whether parties compute at the same time.
        self.at_the_same_time = large and encoders is None
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="party") if self.at_the_same_time else None

    def _of_all(self, call: Callable[[Party], _Found]) -> list[_Found]:
        return list((map if self._pool is None else self._pool.map)(call, self.parties))

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        del timeout
        return Answers(dict(enumerate(self._of_all(lambda party: party.receive(message)))))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        with contextlib.ExitStack() as all_of_them:  # also if closing one of them fails
            for party in self.parties:
                all_of_them.callback(party.close)

    # --- inspection, for a simulator ---

    def exact_embeddings(self, split: Split) -> list[npt.NDArray[np.float32]]:
        return self._of_all(lambda party: party.exact_embeddings(split))

    def public_starts(self) -> list[bool]:
        return [party.public_start for party in self.parties]

    def owner_error(self, party: int) -> Exception | None:
        return self.parties[party].last_error or self.parties[party].fault

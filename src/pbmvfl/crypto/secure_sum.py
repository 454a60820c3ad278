"""The secure sum (Protocol 0 of the paper): the server learns the sum of the parties' integers and nothing else.

    step 1    `key_exchange.KeyExchange.pair_keys` gives each pair of parties a key; both expand it to one keystream
    step 2    `Masks.for_round`: the party with the lower index adds the integers of a pair, the other subtracts them
    step 3    `Masks.add`: a party sends its integers plus its masks, packed by `PackedIntegers.encode`
    step 4    `PackedIntegers.total`: the server adds up what the parties sent, and the masks cancel

Round r uses the keystream at r * L, where L is the size of a full batch. Many rounds are expanded in one call of the
cipher, and only the signed sum over the peers is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.entropy import Zeros, fork_generation, keystream
from pbmvfl.crypto.ring import Ring, add_packed, pack, packed_bytes
from pbmvfl.errors import OutOfOrder, ProtocolError

if TYPE_CHECKING:  # `entropy` imports it at the first use
    from cryptography.hazmat.primitives.ciphers import CipherContext

#: Expanded ahead: enough rounds that the cost of a call disappears, little enough to stay in cache.
_AHEAD_BYTES = 1 << 16
#: One step of the sum over the peers works on this many bytes: large enough to hide the cost of the calls, small
#: enough that both operands stay in the second-level cache.
_STEP_BYTES = 1 << 18
_BLOCK = 16


class Masks:
    """Masks of one party for one session. A round number is used once and never again."""

    def __init__(self, *, ring: Ring, index: int, pair_keys: Mapping[int, bytes], values_per_round: int) -> None:
        """Prepare the masks of one kind of round.

        Args:
            ring: The ring that holds every possible sum.
            index: The party's number.
            pair_keys: Key shared with each peer, by the peer's number.
            values_per_round: Values of a full batch. All parties must agree on it.
        """
        self._ring = ring
        # Peers above us: we add; below us: we subtract. The peer does the opposite. Those we add come first.
        self._peers = [(key, peer > index) for peer, key in sorted(pair_keys.items(), reverse=True)]
        self._slot_bytes = -(-values_per_round * ring.itemsize // _BLOCK) * _BLOCK
        self._rounds_ahead = max(1, _AHEAD_BYTES // self._slot_bytes)
        self._sums = np.empty(self._rounds_ahead * self._slot_bytes, dtype=np.uint8).view(ring.dtype)
        self._scratch = np.empty(min(self._sums.nbytes, _STEP_BYTES), dtype=np.uint8)
        self._zeros = Zeros()
        self._streams: list[CipherContext] = []
        self._first = self._end = -1  # nothing expanded yet
        self._next = 0
        self._generation = fork_generation()

    def for_round(self, number: int, count: int) -> npt.NDArray[Any]:
        """Return the masks of one round: signed integers of each pair, summed over the peers (Protocol 0, step 2).

        Args:
            number: The round, above every one before.
            count: How many masks; at most `values_per_round`.

        Returns:
            A view of `count` integers, valid until the next call. Only their low bits, modulo the ring, are masks.

        Raises:
            OutOfOrder: The masks of this round were used already.
            ProtocolError: The masks belong to the process that forked this one.
        """
        if self._generation != fork_generation():
            # Parent and child would put one mask on two different draws, and the difference of the two has none.
            raise ProtocolError(
                f"round={number}: these masks belong to the process that forked this one, and a mask must not be used "
                "twice; let one process run the party, or start a new session in this one"
            )
        if number < self._next:
            raise OutOfOrder(f"round={number}: its mask was used already; the next one is round {self._next}")
        if not self._first <= number < self._end:
            self._expand(number)
        self._next = number + 1
        start = (number - self._first) * (self._slot_bytes // self._ring.itemsize)
        return self._sums[start : start + count]

    def add(self, number: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the masked values y_m of one round (Protocol 0, step 3).

        Args:
            number: The round, above every one before.
            values: The party's integers q_m, in any shape, of the ring's type.

        Returns:
            The sums as `for_round` returns masks: flat, not yet reduced into the ring. Packing cuts off the high bits.
        """
        masked = self.for_round(number, values.size)
        masked += values.reshape(-1)  # in place: no round's mask is used a second time
        return masked

    def _expand(self, first: int) -> None:
        # The first stream is written straight into the sum. If all peers are below us it has the wrong sign, like
        # all the others: then they are added up and the sum is negated once.
        negate = not self._peers[0][1]
        step = self._scratch.size // self._ring.itemsize
        zeros = self._zeros(self._scratch.size)
        if first != self._end:  # rounds in a row continue the streams; a gap seeks
            self._streams = [self._stream(key, first) for key, _ in self._peers]
        streams = self._streams
        for start in range(0, self._sums.size, step):
            part = self._sums[start : start + step]
            size = part.nbytes
            streams[0].update_into(zeros[:size], part.data.cast("B"))
            drawn = self._scratch[:size]
            target, values = drawn.data, drawn.view(self._ring.dtype)
            for stream, (_, adds) in zip(streams[1:], self._peers[1:], strict=True):
                stream.update_into(zeros[:size], target)
                # Protocol 0, step 2: one integer of a pair, with opposite signs at its two parties.
                (np.add if adds or negate else np.subtract)(part, values, out=part)
            if negate:
                np.negative(part, out=part)
        self._first, self._end = first, first + self._rounds_ahead

    def _stream(self, key: bytes, number: int) -> CipherContext:
        # Protocol 0, step 1: integers that both parties of a pair draw from its seed.
        return keystream(key, first_block=number * self._slot_bytes // _BLOCK)


class PackedIntegers:
    """Payload of integers of k bits each, masked or not, and the server's sum of such payloads."""

    def __init__(self, *, bits: int, ring: Ring) -> None:
        self.bits = bits
        self.ring = ring

    def num_bytes(self, count: int) -> int:
        return packed_bytes(count, self.bits)

    def encode(self, values: npt.NDArray[Any]) -> bytes:
        return pack(values, self.bits)

    def check(self, payload: bytes | memoryview) -> None:
        del payload  # any k bits are an element of the ring

    def total(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        """Return the sum over the parties, in which masks cancel (Protocol 0, step 4).

        Args:
            payloads: What each party sent.
            count: Integers in each payload.

        Returns:
            The sums modulo 2^k, which are the sums of the integers q_m themselves: the ring holds every one.
        """
        # A ring of at most 16 bits adds up in 16, whichever type its elements have.
        totals: npt.NDArray[Any] = np.zeros(count, dtype=np.uint16 if self.ring.bits <= 16 else np.uint32)
        for payload in payloads:
            add_packed(payload, self.bits, totals)
        return self.ring.reduce(totals)

    def each(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.zeros((len(payloads), count), dtype=np.uint16 if self.bits <= 16 else np.uint32)
        for row, payload in zip(values, payloads, strict=True):
            add_packed(payload, self.bits, row)
        return values

"""An alignment between a label holder and parties in one process, with a record of every byte that crossed."""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pbmvfl.deploy.alignment.coordinator import Alignment, LabelSideAlignment
from pbmvfl.deploy.alignment.party import PartySideAlignment
from pbmvfl.deploy.alignment.row_ids import AgreedOrder, RowIds
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.protocol.transport import Answers

NAME = "people"


def hmac_of_order(key: bytes, ids: list[str]) -> bytes:
    """The digest of an order, written out anew."""
    text = b"pbmvfl order 1\0" + struct.pack("<Q", len(ids))
    for each in ids:
        text += struct.pack("<Q", len(each.encode())) + each.encode()
    return hmac.new(key, text, hashlib.sha256).digest()


class MemoryLink:
    """A server's link to handlers in the same process."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        #: (party, question, answer), in their order.
        self.crossed: list[tuple[str, bytes, bytes]] = []
        #: May change a question or an answer on its way: (party, bytes) -> bytes.
        self.on_question: Callable[[str, bytes], bytes] = lambda _, data: data
        self.on_answer: Callable[[str, bytes], bytes] = lambda _, data: data

    @property
    def parties(self) -> Sequence[str]:
        return tuple(self._handlers)

    @property
    def alive(self) -> Sequence[str]:
        return self.parties

    @property
    def first_lost(self) -> str:
        return ""

    def join(self, *, timeout: float) -> None:
        del timeout

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        del timeout
        received = {}
        for index, question in questions.items():
            party = self.parties[index]
            question = self.on_question(party, question)
            answer = self.on_answer(party, self._handlers[party](channel, question))
            self.crossed.append((party, question, answer))
            received[index] = answer
        return Answers(received)

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        return self.ask(dict.fromkeys(range(len(self.parties)), message), channel=Channel.PROTOCOL, timeout=timeout)

    def close(self) -> None:
        pass

    @property
    def all_bytes(self) -> bytes:
        return b"|".join(question + b"|" + answer for _, question, answer in self.crossed)


def align(link: MemoryLink, ids: Any, *, name: str = NAME, **arguments: Any) -> Alignment:
    return LabelSideAlignment(link, RowIds.of(pa.array(ids)), name=name, **arguments).run()


class AlignmentRun:
    """The parties' lists, the link between them, and what each has kept."""

    def __init__(
        self,
        lists: Mapping[str, Any],
        *,
        bank: type[PartySideAlignment] = PartySideAlignment,
        keep: Callable[[AgreedOrder], None] | None = None,
        **limits: Any,
    ) -> None:
        """Make the sides of the lists. That of `bank` may be of another kind; `keep` is called instead of keeping."""
        self.ids = {party: RowIds.of(pa.array(values)) for party, values in lists.items()}
        self.kept: dict[str, AgreedOrder] = {}
        self.sides = {
            party: (bank if party == "bank" else PartySideAlignment)(
                party=party,
                name=NAME,
                ids=ids,
                kinds="ucg",
                keep=keep or functools.partial(self.kept.__setitem__, party),
                **limits,
            )
            for party, ids in self.ids.items()
        }
        self.link = MemoryLink(self.sides)

    def align(self, ids: Any, *, name: str = NAME, **arguments: Any) -> Alignment:
        try:
            return align(self.link, ids, name=name, **arguments)
        finally:
            for side in self.sides.values():
                side.close()

    def ordered(self, party: str) -> list[str]:
        """The ids of the rows that a party has kept, in their order."""
        return self.ids[party].take(self.kept[party].rows)

"""Private alignment of rows, at a party: answers to the label holder's questions.

The party learns how many ids the label holder has, whether they are words or whole numbers, and which of its own rows
all organisations have, in their common order. It reveals how many rows it has, how many numbers a row becomes, the form
of its ids, and for each id that the label holder named whether it is here. Feature values are not read.

A label holder may name arbitrary ids, as many as it announced. The owner's `most_ids` bounds that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from pbmvfl.deploy.alignment.messages import (
    ORDER_CHUNK,
    TAG_BYTES,
    Begin,
    Kind,
    OrderKey,
    PartyFacts,
    Question,
    SharedKey,
    accepted,
    read_agree,
    refused,
)
from pbmvfl.deploy.alignment.psi import CHUNK, Index, PsiServer, chunk_size, num_chunks, points_of, secret_order
from pbmvfl.deploy.alignment.row_ids import AgreedOrder, RowIds, Rows, order_digest
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.errors import AlignmentError

_log = logging.getLogger(__name__)
#: Chunks of the setup that are made ahead while others travel.
_AHEAD = 2
_FAULT = "something failed at this party; its owner's log says what"


class PartySideAlignment:
    """Party's role in one alignment. After a refusal it is over."""

    def __init__(
        self,
        *,
        party: str,
        name: str,
        ids: RowIds,
        kinds: str,
        keep: Callable[[AgreedOrder], None],
        most_ids: int = 10_000_000,
        least_rows: int = 1,
    ) -> None:
        """Store the parameters.

        Args:
            party: Name of this party.
            name: The alignment that the owner expects.
            ids: The party's ids.
            kinds: Kinds of its columns (`plan.shapes`).
            keep: Writes the rows in their order, once all agree.
            most_ids: Largest number of the label holder's ids: each is a query whether that person is here.
            least_rows: Smallest number of common rows: fewer would single out people.
        """
        self._party, self._name, self._ids, self._kinds, self._keep = party, name, ids, kinds, keep
        self._most_ids, self._least_rows = most_ids, least_rows
        self._begin: Begin | None = None
        self._psi: PsiServer | None = None
        self._shared: SharedKey | None = None
        self._places = np.zeros(0, np.int64)  # of own rows in the setup
        self._setups: dict[int, Future[bytes]] = {}
        self._asked: set[tuple[Kind, int]] = set()
        self._tags: Index | None = None  # of all own rows, by the keyed digest of their id
        self._rows: list[Rows] = []
        self._agreed: AgreedOrder | None = None
        self._over = False
        #: True once the rows are written and the alignment is complete here.
        self.kept = False
        #: Last error, for the owner's log only; never sent.
        self.last_error: Exception | None = None

    def __call__(self, channel: Channel, data: bytes) -> bytes:
        """Handle a link's question."""
        return self.receive(data) if channel is Channel.ALIGN else refused("this party is here to align rows")

    def receive(self, data: bytes) -> bytes:
        """Answer any question. The link asks no question twice."""
        try:
            if self._over:
                raise AlignmentError("this alignment was refused, and is over; begin another")
            return accepted(self._answer(Question.from_bytes(data)))
        except Exception as error:
            self._over, self.last_error = True, self.last_error or error
            self.close()
            # Errors of this class mention only messages, counts and limits, so they may be sent; other errors may not.
            _log.warning("alignment refused: %s", error)
            return refused(str(error) if isinstance(error, AlignmentError) else _FAULT)

    def close(self) -> None:
        """Forget the key. Idempotent."""
        if self._psi is not None:
            self._psi.close()
            self._psi = None

    def _answer(self, question: Question) -> bytes:
        if question.kind is Kind.BEGIN:
            return self._receive_begin(question)
        if self._begin is None:
            raise AlignmentError(f"{question.kind.name} before BEGIN")
        if (question.kind, question.number) in self._asked:
            raise AlignmentError(f"{question.kind.name} {question.number} was asked before")
        self._asked.add((question.kind, question.number))
        match question.kind:
            case Kind.SETUP:
                return self._receive_setup(question)
            case Kind.REQUEST:
                return self._receive_request(question, self._begin)
            case Kind.ORDER:
                return self._receive_order(question, self._begin)
            case Kind.AGREE:
                return self._receive_agree(question)
            case _:
                return self._receive_keep(question)

    # --- intersection ---

    def _receive_begin(self, question: Question) -> bytes:
        begin = Begin.from_body(question.body)
        if self._begin is not None or question.number:
            raise AlignmentError("BEGIN was asked before; a second list of ids needs another alignment")
        if begin.name != self._name:
            raise AlignmentError(f"name={begin.name!r}: this party is here for {self._name!r}")
        if begin.count > self._most_ids:
            raise AlignmentError(
                f"the label holder has {begin.count:,} ids; its owner's policy permits {self._most_ids:,}"
            )
        if not begin.form.fits(self._ids.form):
            raise AlignmentError(
                f"its ids are {self._ids.form.words}, the label holder's are {begin.form.words}; store them in one "
                "type, so that the same id is spelled alike"
            )
        own = OrderKey()
        self._shared = own.with_share(begin.share, label_share=begin.share, party_share=own.share, party=self._party)
        self._psi = PsiServer()
        self._places = secret_order(len(self._ids))
        self._begin = begin
        self._prepare_setup(0)
        return PartyFacts(count=len(self._ids), form=self._ids.form, share=own.share, kinds=self._kinds).to_body()

    def _prepare_setup(self, first: int) -> None:
        assert self._psi is not None
        for chunk in range(first, min(first + 1 + _AHEAD, num_chunks(len(self._ids)))):
            if chunk not in self._setups:
                rows = self._places[chunk * CHUNK : (chunk + 1) * CHUNK]
                self._setups[chunk] = self._psi.setup(partial(self._ids.take, rows))

    def _receive_setup(self, question: Question) -> bytes:
        if question.number >= num_chunks(len(self._ids)) or question.body:
            raise AlignmentError(f"SETUP {question.number}: there are {num_chunks(len(self._ids))} of them")
        self._prepare_setup(question.number)
        return self._setups.pop(question.number).result()

    def _receive_request(self, question: Question, begin: Begin) -> bytes:
        assert self._psi is not None
        if question.number >= num_chunks(begin.count):
            raise AlignmentError(f"REQUEST {question.number}: for {begin.count:,} ids there are fewer")
        return self._psi.response(points_of(question.body, chunk_size(begin.count, question.number)))

    # --- common order ---

    def _receive_order(self, question: Question, begin: Begin) -> bytes:
        """Find rows by their keyed digests. An unknown digest would be a false match, or a guess."""
        assert self._shared is not None
        if question.number != len(self._rows) or self._agreed is not None:
            raise AlignmentError(f"ORDER {question.number}: the next part is {len(self._rows)}")
        body = self._shared.open(question)
        count, rest = divmod(len(body), TAG_BYTES)
        named = count + sum(map(len, self._rows))
        if rest or not 1 <= count <= ORDER_CHUNK or named > min(begin.count, len(self._ids)):
            raise AlignmentError(f"ORDER names {named:,} rows with {len(body)} bytes, more than both sides can share")
        if self._tags is None:
            tags = b"".join(self._shared.tag(each) for piece in self._ids.pieces() for each in piece)
            self._tags = Index(tags, TAG_BYTES)
        rows = self._tags.places_of(body)
        if (rows < 0).any():  # their number would answer more than one guess
            raise AlignmentError("the order has rows that this party lacks; nothing was kept")
        self._rows.append(rows)
        return b""

    def _receive_agree(self, question: Question) -> bytes:
        assert self._shared is not None
        count, key = read_agree(self._shared.open(question))
        rows = np.concatenate([np.zeros(0, np.int64), *self._rows])
        if len(rows) != count or not count or len(np.unique(rows)) != count:
            raise AlignmentError(f"the order has {len(rows):,} rows, not {count:,} different ones; nothing was kept")
        if count < self._least_rows:
            raise AlignmentError(f"{count:,} rows are common; its owner's policy wants {self._least_rows:,}")
        digest = order_digest(key, self._ids.pieces(rows), count)
        self._agreed = AgreedOrder(name=self._name, rows=rows, key=key, digest=digest)
        self._tags = None
        self.close()
        return digest

    def _receive_keep(self, question: Question) -> bytes:
        if self._agreed is None or question.body:
            raise AlignmentError("KEEP before AGREE")
        try:
            self._keep(self._agreed)
        except Exception as error:  # errors of files and disks are for the owner alone
            self.last_error = error
            raise AlignmentError(_FAULT) from error
        self.kept = True
        return b""

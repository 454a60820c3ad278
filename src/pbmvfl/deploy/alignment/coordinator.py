"""Private alignment of rows, at the label holder: the rows that all organisations have, and one order of them.

The label holder intersects its ids with those of each party separately, all parties at the same time; then it draws a
random order of the common ids, and sends it to each. No id leaves an organisation in clear.

The label holder learns of each party: which of the label holder's own ids that party has, how many rows the party has,
how many numbers a row becomes there, and whether ids are words or whole numbers. Of a party's other ids it learns how
many. A party learns how many ids the label holder has, their form, and which of its own rows all organisations have. It
learns neither what other parties have beyond that, nor how many parties there are. All learn the common order and the
alignment's key, with which each proves the order at every later handshake.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from pbmvfl.deploy.alignment.messages import (
    ORDER_CHUNK,
    Begin,
    Kind,
    OrderKey,
    PartyFacts,
    Question,
    SharedKey,
    agree_body,
    read_answer,
)
from pbmvfl.deploy.alignment.psi import (
    CHUNK,
    Index,
    PsiClient,
    chunk_size,
    num_chunks,
    points_of,
    secret_order,
    whole_setup,
)
from pbmvfl.deploy.alignment.row_ids import KEY_BYTES, AgreedOrder, IdForm, RowIds, Rows, order_digest
from pbmvfl.deploy.link.interface import Channel, ServerLink
from pbmvfl.deploy.site.folder import check_name
from pbmvfl.errors import AlignmentError, PartyLost

#: Called with the steps done and their total.
Progress = Callable[[int, int], None]
#: Responses of each party that wait while later ones travel.
_BEHIND = 3


@dataclass(frozen=True, kw_only=True)
class PartyRecord:
    """Facts that the label holder learned of a party."""

    count: int
    #: Of its columns, as in `PartyFacts`.
    kinds: str
    form: IdForm
    #: Number of the label holder's ids that the party has.
    common: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment(AgreedOrder):
    """Result of an alignment at the label holder: numbers of its own rows, in the common order."""

    parties: Mapping[str, PartyRecord]


class LabelSideAlignment:
    """Label holder's role in one alignment: questions the parties, and finds the common order."""

    def __init__(
        self,
        link: ServerLink,
        ids: RowIds,
        *,
        name: str,
        most_ids: int = 10_000_000,
        progress: Progress | None = None,
    ) -> None:
        """Store the parameters.

        Args:
            link: The link to the parties.
            ids: The label holder's ids.
            name: Name of the alignment.
            most_ids: Largest number of ids that a party may announce; all of them are processed.
            progress: Called with the steps done and their total.
        """
        check_name(name, "alignment")
        self._link, self._ids, self._name, self._most_ids, self._progress = link, ids, name, most_ids, progress
        self._psi = PsiClient()
        self._names = tuple(link.parties)
        self._done, self._total = 0, 1

    def run(self) -> Alignment:
        """Find the rows that all have. No party keeps anything before all agree on the order."""
        try:
            return self._run()
        finally:
            self._psi.close()

    def _run(self) -> Alignment:
        places = secret_order(len(self._ids))
        chunks = [places[start : start + CHUNK] for start in range(0, len(places), CHUNK)]
        # While parties make their setups. Ids are taken when their turn comes: as objects they need much memory.
        requests = [self._psi.request(partial(self._ids.take, rows)) for rows in chunks]
        facts, shared = self._begin()
        self._total = max(num_chunks(each.count) for each in facts) + len(chunks) + 2
        setups = self._setups(facts)
        has = self._intersect(chunks, requests, setups)
        records = {
            party: PartyRecord(count=fact.count, kinds=fact.kinds, form=fact.form, common=int(mine.sum()))
            for party, fact, mine in zip(self._names, facts, has, strict=True)
        }
        common = np.flatnonzero(np.logical_and.reduce(has))
        self._check(records, len(common))
        rows = common[secret_order(len(common))]
        alignment = self._agree(rows, shared, records)
        self._ask_all(dict.fromkeys(range(len(self._names)), Question(Kind.KEEP)))
        self._step(self._total - self._done)
        return alignment

    # --- questions ---

    def _ask_all(self, questions: Mapping[int, Question]) -> dict[int, bytes]:
        """Return the bodies of all answers; a lost or refusing party ends the alignment."""
        sent = {index: question.to_bytes() for index, question in questions.items()}
        answers = self._link.ask(sent, channel=Channel.ALIGN)
        if answers.lost:
            raise PartyLost(answers.lost)
        bodies, refusals = {}, []
        for index in sent:
            try:
                bodies[index] = read_answer(answers.received[index], self._names[index])
            except AlignmentError as error:
                refusals.append(str(error))
        if refusals:
            raise AlignmentError("; ".join(refusals))
        return bodies

    def _step(self, by: int = 1) -> None:
        self._done += by
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _fault(self, index: int, words: object) -> AlignmentError:
        return AlignmentError(f"party={self._names[index]}: {words}")

    # --- intersection ---

    def _begin(self) -> tuple[list[PartyFacts], list[SharedKey]]:
        own = [OrderKey() for _ in self._names]
        count, form = len(self._ids), self._ids.form
        said = [Begin(name=self._name, count=count, form=form, share=each.share) for each in own]
        asked = {index: Question(Kind.BEGIN, body=begin.to_body()) for index, begin in enumerate(said)}
        facts, shared = [], []
        for index, body in sorted(self._ask_all(asked).items()):
            try:
                fact = PartyFacts.from_body(body)
                key = own[index].with_share(
                    fact.share, label_share=own[index].share, party_share=fact.share, party=self._names[index]
                )
            except AlignmentError as error:
                raise self._fault(index, error) from None
            if fact.count > self._most_ids:
                raise self._fault(index, f"it says that it has {fact.count:,} ids; permitted: {self._most_ids:,}")
            if not self._ids.form.fits(fact.form):
                raise self._fault(
                    index,
                    f"its ids are {fact.form.words}, the label holder's are {self._ids.form.words}; store them in one "
                    "type, so that the same id is spelled alike",
                )
            facts.append(fact)
            shared.append(key)
        return facts, shared

    def _setups(self, facts: Sequence[PartyFacts]) -> list[Index]:
        """Fetch all setups chunk by chunk, from the parties that have another chunk."""
        found: list[list[bytes]] = [[] for _ in facts]
        for chunk in range(max(num_chunks(each.count) for each in facts)):
            asked = {i: Question(Kind.SETUP, chunk) for i, each in enumerate(facts) if chunk < num_chunks(each.count)}
            for index, body in self._ask_all(asked).items():
                self._points(index, body, chunk_size(facts[index].count, chunk))
                found[index].append(body)
            self._step()
        setups = []
        for chunks in found:
            setups.append(whole_setup(chunks))
            chunks.clear()
        return setups

    def _points(self, index: int, body: bytes, count: int) -> list[bytes]:
        try:
            return points_of(body, count)
        except AlignmentError as error:
            raise self._fault(index, error) from None

    def _intersect(
        self, chunks: Sequence[Rows], requests: Sequence[Future[bytes]], setups: Sequence[Index]
    ) -> list[np.ndarray]:
        """Find each party's share of the own rows; responses are processed while the next ones travel."""
        has = [np.zeros(len(self._ids), dtype=bool) for _ in setups]
        working: deque[tuple[int, Rows, Future[Rows]]] = deque()
        for chunk, (rows, request) in enumerate(zip(chunks, requests, strict=True)):
            asked = Question(Kind.REQUEST, chunk, request.result())
            for index, body in self._ask_all(dict.fromkeys(range(len(setups)), asked)).items():
                found = self._psi.matches(setups[index], self._points(index, body, len(rows)))
                working.append((index, rows, found))
            while len(working) > _BEHIND * len(setups):
                self._note(*working.popleft(), has)
            self._step()
        while working:
            self._note(*working.popleft(), has)
        return has

    def _note(self, index: int, rows: Rows, found: Future[Rows], has: Sequence[np.ndarray]) -> None:
        try:
            has[index][rows[found.result()]] = True
        except AlignmentError as error:
            raise self._fault(index, error) from None

    def _check(self, records: Mapping[str, PartyRecord], count: int) -> None:
        none = [name for name, record in records.items() if not record.common]
        if none:
            raise AlignmentError(
                f"{', '.join(none)}: none of the label holder's {len(self._ids):,} ids is there"
                f"{self._spelled(records, none)}; check that the same ids are spelled alike"
            )
        if not count:
            said = ", ".join(f"{name} has {record.common:,} of them" for name, record in records.items())
            raise AlignmentError(
                f"0 of the label holder's {len(self._ids):,} ids are at all parties ({said}); needed: at least 1; "
                "align rows of the same people"
            )

    def _spelled(self, records: Mapping[str, PartyRecord], names: Sequence[str]) -> str:
        other = next((records[name].form for name in names if records[name].form is not self._ids.form), None)
        if other is None:
            return ""
        return f" (they are {other.words} there and {self._ids.form.words} here: were leading zeros lost?)"

    # --- common order ---

    def _agree(self, rows: Rows, shared: Sequence[SharedKey], records: Mapping[str, PartyRecord]) -> Alignment:
        """Send all parties the order, and check that all have the same."""
        for part, start in enumerate(range(0, len(rows), ORDER_CHUNK)):
            ids = self._ids.take(rows[start : start + ORDER_CHUNK])
            self._ask_all(
                {
                    index: key.seal(Question(Kind.ORDER, part, b"".join(key.tag(each) for each in ids)))
                    for index, key in enumerate(shared)
                }
            )
        secret = os.urandom(KEY_BYTES)
        digest = order_digest(secret, self._ids.pieces(rows), len(rows))
        agree = Question(Kind.AGREE, body=agree_body(len(rows), secret))
        for index, answer in self._ask_all({index: key.seal(agree) for index, key in enumerate(shared)}).items():
            if answer != digest:
                raise self._fault(index, "its order is another than the label holder's; nothing was kept")
        self._step()
        return Alignment(name=self._name, rows=rows, key=secret, digest=digest, parties=dict(records))

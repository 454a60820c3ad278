"""One session of a run: messages from the server to every link and back, counted to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pbmvfl.errors import PbmvflError, ProtocolError
from pbmvfl.server import Server
from pbmvfl.transport.links import PartyLink
from pbmvfl.wire.traffic import Traffic

#: Called with (direction, party, bytes) for every message; tests record transcripts with it.
Tap = Callable[[str, int, bytes], None]


@dataclass
class Meter:
    """Counts what really crosses the wire."""

    bytes_setup: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    rounds: int = 0
    taps: list[Tap] = field(default_factory=list)

    def record(self, direction: str, party: int, data: bytes, *, setup: bool) -> None:
        if setup:
            self.bytes_setup += len(data)
        elif direction == "up":
            self.bytes_up += len(data)
        else:
            self.bytes_down += len(data)
        for tap in self.taps:
            tap(direction, party, data)

    def traffic(self) -> Traffic:
        return Traffic(self.bytes_setup, self.bytes_up, self.bytes_down, self.rounds)


def drive(
    server: Server,
    links: Sequence[PartyLink],
    meter: Meter,
    *,
    on_open: Callable[[], None],
    on_round: Callable[[], None],
    on_epoch_end: Callable[[], None],
) -> None:
    """Run the server's plan to its end. `on_open` comes before the first release, `on_epoch_end` after each epoch."""
    for link in links:
        link.hello()
    _collect(server, links, meter, setup=True)
    opened = False
    while True:
        if not opened and not server.waits_for_answers:
            opened = True
            on_open()
        message = server.advance()
        if opened and server.round is not None and server.completed_rounds > meter.rounds + server.first_round:
            meter.rounds += 1
            on_round()
        if message is None:
            return
        for party, link in enumerate(links):
            meter.record("down", party, message, setup=not opened)
            link.send(message)
        _collect(server, links, meter, setup=not opened)
        if server.at_epoch_end:
            on_epoch_end()


def _collect(server: Server, links: Sequence[PartyLink], meter: Meter, *, setup: bool) -> None:
    expected = server.waits_for_answers
    answers: list[bytes] = []
    refusal: PbmvflError | None = None
    for link in links:  # all of them, also after a refusal: whoever was asked has an answer on the way
        try:
            answers.append(link.answer())
        except PbmvflError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    for party, answer in enumerate(answers):
        if not answer and not expected:
            continue
        if not expected:
            raise ProtocolError(f"party={party} answered a message that has no answer")
        meter.record("up", party, answer, setup=setup)
        server.receive(answer, sender=party)  # a link has one party at its other end, whatever a header says

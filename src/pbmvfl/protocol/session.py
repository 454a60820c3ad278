"""Drive one session of a run: the server's messages to every party and their answers, counted to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pbmvfl.errors import PartyLost, PartyRefused
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.transport import Transport
from pbmvfl.wire.traffic import Traffic

#: Called with (direction, party, bytes) for every message.
Tap = Callable[[str, int, bytes], None]


@dataclass
class Meter:
    """Count of the bytes that cross the wire."""

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
    transport: Transport,
    meter: Meter,
    *,
    on_open: Callable[[], None],
    on_round: Callable[[], None],
    on_epoch_end: Callable[[], None],
    timeout: float | None = None,
) -> None:
    """Run the server's plan to its end (Algorithm 2, line 2).

    Args:
        server: The server's state machine.
        transport: The way to the parties.
        meter: Counts bytes and rounds.
        on_open: Called before the first release.
        on_round: Called after each round.
        on_epoch_end: Called after each epoch and each fusion round, when roles keep checkpoints.
        timeout: Seconds to wait for the answers to one message; None waits without limit.

    Raises:
        PartyRefused: A party refused a message.
        PartyLost: A party did not answer.
    """
    opened = False
    while True:  # Algorithm 2, line 2
        if not opened and server.is_open:
            opened = True
            on_open()
        message = server.advance()
        if opened and server.round is not None and server.completed_rounds > meter.rounds + server.first_round:
            meter.rounds += 1
            on_round()
        if message is None:
            return
        deliver(server, transport, meter, message, setup=not opened, timeout=timeout)
        if opened and server.at_epoch_end:
            on_epoch_end()


def deliver(
    server: Server, transport: Transport, meter: Meter, message: bytes, *, setup: bool, timeout: float | None = None
) -> None:
    """Exchange one message for the answers of all parties.

    Every answer is recorded before a refusal is raised: other parties may have released the round.

    Args:
        server: The server's state machine.
        transport: The way to the parties.
        meter: Counts bytes.
        message: Bytes for every party.
        setup: Whether the bytes count as handshake.
        timeout: Seconds to wait; None waits without limit.

    Raises:
        PartyRefused: A party refused the message.
        PartyLost: A party did not answer.
    """
    for party in range(server.plan.num_parties):
        meter.record("down", party, message, setup=setup)
    answers = transport.exchange(message, timeout=timeout)
    refusal: PartyRefused | None = None
    for party, answer in sorted(answers.received.items()):
        if not answer:
            continue
        meter.record("up", party, answer, setup=setup)
        try:
            server.receive(answer, sender=party)  # a line has one party at its other end, whatever a header says
        except PartyRefused as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    if answers.lost:
        raise PartyLost(answers.lost)

"""The gRPC link does what every transport must do; and what a link does besides."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest

from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.link.grpc_stream import event_loop
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.federation.party_setup import PartySetup
from support.line_parties import SERVER, Federation, LineThreads, Proxy, echo, identity_of, until
from support.transport_conformance import TransportConformance


class TestGrpcLink(TransportConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory):
        self.folder = tmp_path_factory

    def open(self, parties: Sequence[PartySetup]) -> LineThreads:
        return LineThreads(parties, self.folder.mktemp("line"))

    def lose(self, transport: LineThreads, party: int) -> None:
        transport.ends[party].close()

    def hold(self, transport: LineThreads, party: int) -> None:
        transport.held[party].clear()

    def release(self, transport: LineThreads, party: int) -> None:
        transport.held[party].set()


@pytest.fixture
def federation(tmp_path) -> Iterator[Federation]:
    with Federation(tmp_path, patience=60) as made:
        yield made


@pytest.fixture
def proxy(federation) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(federation.line.address)) as made:
        yield made


def dial_all(federation: Federation) -> None:
    for name in federation.names:
        federation.dial(name, echo)
    federation.line.join(timeout=60)


def end_of(site, handle=echo, **choices) -> str:
    """The words that a party's line ends with."""
    with pytest.raises(LinkError) as ended:
        site.line(**choices).serve(handle)
    return str(ended.value)


# --- asking ---


def test_each_party_gets_its_own_question_and_others_none(federation):
    dial_all(federation)
    answers = federation.line.ask({0: b"zero", 2: b"two"}, channel=Channel.ALIGN)
    assert dict(answers.received) == {0: b"\3zero", 2: b"\3two"}
    assert not answers.lost
    assert list(federation.line.alive) == list(federation.line.parties) == ["bank", "hospital", "insurer"]


def test_long_questions_and_answers_of_all_parties_travel_at_the_same_time(federation):
    dial_all(federation)
    long = bytes(range(256)) * 40_000  # more than all buffers on the way
    answers = federation.line.ask(dict.fromkeys(range(3), long), channel=Channel.SETUP)
    assert dict(answers.received) == dict.fromkeys(range(3), b"\1" + long)


def test_a_question_that_is_too_long_is_said_so_before_anything_is_sent(tmp_path):
    with Federation(tmp_path, ["bank"], choices={"message_limit": 1000}) as federation:
        federation.dial("bank", echo)
        with pytest.raises(LinkError, match="a question of 1,025 bytes; permitted: at most 1,000"):
            federation.line.ask({0: bytes(1000)}, channel=Channel.SETUP)
        assert federation.line.ask({0: b"short"}, channel=Channel.SETUP).received == {0: b"\1short"}


def test_a_late_answer_is_not_taken_for_the_next_question(tmp_path):
    with Federation(tmp_path, ["bank"]) as federation:
        go = threading.Event()

        def handle(channel: Channel, body: bytes) -> bytes:
            go.wait()
            return echo(channel, body)

        federation.dial("bank", handle)
        federation.line.join(timeout=60)
        late = federation.line.ask({0: b"first"}, channel=Channel.SETUP, timeout=0.1)
        assert late.lost == {0: "no answer within 0.1 seconds"}
        go.set()
        assert federation.line.ask({0: b"second"}, channel=Channel.SETUP).received == {0: b"\1second"}


def test_a_question_given_up_and_asked_again_is_handled_once(tmp_path):
    with Federation(tmp_path, ["bank"]) as federation:
        go, heard = threading.Event(), []

        def handle(channel: Channel, body: bytes) -> bytes:
            heard.append(body)
            go.wait()
            return echo(channel, body)

        federation.dial("bank", handle)
        federation.line.join(timeout=60)
        assert federation.line.ask({0: b"x"}, channel=Channel.SETUP, timeout=0.1).lost
        go.set()
        assert federation.line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}
        assert heard == [b"x"]


def test_the_last_question_ends_the_partys_side(federation):
    site = federation.site("bank")
    thread = threading.Thread(target=lambda: site.line().serve(echo), daemon=True)
    thread.start()
    assert federation.line.ask({0: b"done"}, channel=Channel.END).received == {0: b"\4done"}
    federation.line.close()
    thread.join(timeout=60)
    assert not thread.is_alive()


# --- connections that break ---


def test_a_party_that_redials_gets_the_same_question_and_sends_the_same_bytes(federation, proxy):
    answers = iter([b"first", b"second", b"never"])

    def handle(_: Channel, body: bytes) -> bytes:
        if body == b"cut":
            proxy.cut()  # the answer will not get through
        return next(answers)

    federation.dial("bank", handle, address=proxy.address)
    assert federation.line.ask({0: b"hello"}, channel=Channel.SETUP).received == {0: b"first"}
    assert federation.line.ask({0: b"cut"}, channel=Channel.SETUP).received == {0: b"second"}
    assert federation.line.num_redials == 1
    assert next(answers) == b"never"


def test_a_party_redials_while_it_works_so_that_nobody_takes_it_for_dead(tmp_path):
    connected_again: list[bool] = []
    with (
        Federation(tmp_path, ["bank"], choices={"ended_after": 30.0}) as federation,
        contextlib.closing(Proxy(federation.line.address)) as proxy,
    ):

        def handle(_: Channel, body: bytes) -> bytes:
            proxy.cut()
            connected_again.append(until(lambda: federation.line.num_redials > 0))
            return body

        federation.dial("bank", handle, address=proxy.address)
        assert federation.line.ask({0: b"long work"}, channel=Channel.SETUP).received == {0: b"long work"}
    assert connected_again == [True]


def test_rounds_go_on_through_many_cuts(federation, proxy):
    federation.dial("bank", echo, address=proxy.address)
    for number in range(40):
        if number % 4 == 3:
            proxy.cut()
        body = b"%d" % number
        assert federation.line.ask({0: body}, channel=Channel.SETUP).received == {0: b"\1" + body}
    assert federation.line.num_redials >= 10


def test_the_newest_connection_of_a_party_counts(federation, proxy):
    """As after a cut that the server has not noticed yet."""
    site = federation.site("bank")
    auth = site.auth()
    first, second = (site.line(auth=auth, address=address) for address in (proxy.address, federation.line.address))
    threads = []
    for line in (first, second):
        threads.append(threading.Thread(target=_served, args=(line,), daemon=True))
        threads[-1].start()
        assert until(lambda: federation.line.num_redials == len(threads) - 1 and "bank" in federation.line.alive)
        if line is first:
            assert federation.line.ask({0: b"one"}, channel=Channel.SETUP).received == {0: b"\1one"}
            first._dial = _never  # it does not dial again
    assert federation.line.ask({0: b"two"}, channel=Channel.SETUP).received == {0: b"\1two"}
    for line in (first, second):
        line.close()


async def _never() -> None:
    await asyncio.Event().wait()


def _served(line) -> None:
    with contextlib.suppress(LinkError):
        line.serve(echo)


def test_a_new_process_in_a_partys_place_loses_the_party(federation):
    dial_all(federation)
    words = end_of(federation.site("bank"))
    assert words == "server: it refused this site: party=bank: its process was replaced by another one"
    answers = federation.line.ask(dict.fromkeys(range(3), b"x"), channel=Channel.SETUP)
    assert answers.lost == {0: "its process was replaced"}
    assert set(answers.received) == {1, 2}
    assert "bank" not in federation.line.alive


def test_a_party_that_never_came_is_named(federation):
    federation.dial("bank", echo)
    federation.dial("insurer", echo)
    with pytest.raises(PartyLost, match=r"party=1: hospital did not join within 0.5 seconds") as lost:
        federation.line.join(timeout=0.5)
    assert 1 in lost.value.reasons


def test_a_party_that_never_came_is_lost_when_the_patience_is_over(tmp_path):
    with Federation(tmp_path, ["bank"], patience=0.3) as federation:
        assert federation.line.exchange(b"x").lost == {0: "no connection within 0.3 seconds"}


# --- the party's side ---


def test_a_party_lets_go_when_the_server_asks_nothing(federation):
    words = end_of(federation.site("bank"), idle=0.3)
    assert words == "server: it asked nothing for 0.3 seconds; the party lets go"


def test_a_party_lets_go_at_once_when_the_server_says_goodbye(federation):
    def ask_and_leave() -> None:  # the party's answer is here, and it waits for the next question
        federation.line.ask({0: b"x"}, channel=Channel.PROTOCOL)
        federation.line.close()

    threading.Thread(target=_ignoring(ask_and_leave), daemon=True).start()
    words = end_of(federation.site("bank"), ended_after=60)
    assert words == "server: it closed the line before the work was over"


def test_a_party_lets_go_when_the_servers_process_has_ended(federation, proxy):
    def handle(*_: object) -> bytes:
        proxy.close()  # nobody says goodbye, and nobody listens any more
        return b""

    asked = threading.Thread(target=_ignoring(federation.line.exchange), args=(b"x",), daemon=True)
    asked.start()
    words = end_of(federation.site("bank"), handle, address=proxy.address, ended_after=0.3)
    assert words == "server: its process ended"


def _ignoring(call):
    def quiet(*arguments: object) -> None:
        with contextlib.suppress(LinkError):
            call(*arguments)

    return quiet


def test_the_last_answer_gets_through_although_its_connection_breaks(federation, proxy):
    def handle(channel: Channel, body: bytes) -> bytes:
        proxy.cut()
        return echo(channel, body)

    end = federation.site("bank").line(address=proxy.address)
    thread = threading.Thread(target=lambda: end.serve(handle), daemon=True)
    thread.start()
    assert federation.line.ask({0: b"done"}, channel=Channel.END).received == {0: b"\4done"}
    federation.line.close()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_party_that_cannot_reach_its_server_says_where_and_why(federation):
    site = federation.site("bank")
    federation.line.close()
    words = end_of(site, patience=0.3)
    host, port = site.address
    assert words == f"server: not reached at {host}:{port} within 0.3 seconds: no process listens there"


def test_a_party_waits_while_the_server_of_an_earlier_job_still_listens(federation, monkeypatch):
    """Its own server comes to the same port when the earlier one has let go of it."""
    before = federation.line
    pins = {name: identity_of(name).public for name in federation.names}
    site = federation.site("bank", context=b"federation, job 2")
    end, joins, join = site.line(), [0], PartyMessageAuth.join

    def counted(self, challenge: bytes) -> bytes:
        joins[0] += 1
        return join(self, challenge)

    monkeypatch.setattr(PartyMessageAuth, "join", counted)
    thread = threading.Thread(target=_served, args=(end,), daemon=True)
    thread.start()
    assert until(lambda: joins[0] > 0)  # it came to the wrong one
    before.close()
    auth = ServerMessageAuth(identity_of(SERVER), pins, b"federation, job 2")
    line = GrpcServerLink(
        listen=before.address,
        credentials=federation.authority.issue(SERVER),
        auth=auth,
        parties=federation.names,
        patience=60,
    )
    try:
        assert line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}
    finally:
        end.close()
        line.close()
        thread.join(timeout=60)


def _tasks() -> set[object]:
    """What still runs in the streams' loop; it is its own between two of our steps."""
    return asyncio.all_tasks(event_loop())


def test_closing_from_another_thread_ends_whoever_waits_and_every_task(tmp_path):
    federation = Federation(tmp_path, ["bank"])
    held = threading.Event()
    end = federation.dial("bank", lambda *_: b"%d" % held.wait())
    federation.line.join(timeout=60)
    asking = threading.Thread(target=_ignoring(federation.line.exchange), args=(b"x",), daemon=True)
    asking.start()
    federation.line.close()
    asking.join(timeout=60)
    assert not asking.is_alive()
    held.set()
    end.close()
    federation.close()
    assert until(lambda: not _tasks())
    with pytest.raises(LinkError, match="the line is closed"):
        federation.line.exchange(b"x")


def test_a_port_that_is_taken_is_named(federation, monkeypatch):
    monkeypatch.setattr("pbmvfl.deploy.link.grpc_server.PORT_PATIENCE", 0.2)
    host, port = federation.line.address
    with pytest.raises(LinkError, match=f"port={port} of {host} cannot be listened on"):
        GrpcServerLink(
            listen=(host, port),
            credentials=federation.authority.issue(SERVER),
            auth=federation.auth,
            parties=federation.names,
            patience=1,
        )

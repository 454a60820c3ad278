"""Whoever is not a party of this federation, in this job, gets nothing; and cannot keep those out who are."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from pbmvfl.deploy.link import grpc_party, grpc_server
from pbmvfl.deploy.link import grpc_stream as streams
from pbmvfl.deploy.link.grpc_party import MOST_WAITING, GrpcPartyLink
from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.link.grpc_stream import Outbox
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.link.tls import Credentials, party_context
from pbmvfl.errors import LinkError
from support.certificates import Authority
from support.line_parties import CONTEXT, SERVER, Federation, Guest, Site, echo, identity_of, until


@pytest.fixture
def federation(tmp_path) -> Iterator[Federation]:
    with Federation(tmp_path, ["bank", "hospital"]) as made:
        yield made


def refusal(site: Site, **choices: object) -> str:
    """What a party's line ends with."""
    with pytest.raises(LinkError) as ended:
        site.line(**choices).serve(lambda *_: pytest.fail("it was asked something"))
    return str(ended.value)


def still_works(federation: Federation) -> bool:
    """Whether a true party is let in after whatever was tried."""
    federation.dial("bank", echo)
    return federation.line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}


# --- certificates ---


def test_without_a_certificate_nobody_is_heard(federation):
    context = ssl.create_default_context(cafile=str(federation.authority.folder / "rootCA.pem"))
    context.check_hostname = False
    with (
        socket.create_connection(federation.line.address, timeout=60) as raw,
        context.wrap_socket(raw) as guest,
        contextlib.suppress(ssl.SSLError, ConnectionResetError),
    ):
        assert guest.recv(1) == b"", "the server says nothing"
    assert federation.line.alive == []
    assert still_works(federation)


def test_a_certificate_of_another_federation_is_refused(federation, tmp_path):
    other = Authority(tmp_path / "other").issue("bank")
    mixed = Credentials(
        certificate=other.certificate,
        private_key=other.private_key,
        authority=federation.authority.folder / "rootCA.pem",
    )
    assert "it does not accept this site's certificate" in refusal(federation.site("bank", credentials=mixed))
    assert still_works(federation)


def test_a_server_of_another_federation_is_refused(federation, tmp_path):
    own = federation.authority.issue("bank")
    Authority(tmp_path / "other")
    mixed = Credentials(
        certificate=own.certificate, private_key=own.private_key, authority=tmp_path / "other" / "rootCA.pem"
    )
    words = refusal(federation.site("bank", credentials=mixed))
    assert "server: its certificate is not accepted here: it was not signed by this federation's authority" in words
    assert "a proxy in between that inspects HTTPS" in words


def test_a_servers_certificate_without_its_name_is_said_to_be_an_older_one(federation):
    line = GrpcServerLink(
        listen=("127.0.0.1", 0),
        credentials=federation.authority.issue(SERVER, alternative="fed.clinic.example"),
        auth=federation.auth,
        parties=["bank"],
        patience=60,
    )
    try:
        words = refusal(federation.site("bank", address=line.address))
        assert words.startswith("server: its certificate lacks the alternative name clinic: it was made by an older")
    finally:
        line.close()


@pytest.mark.parametrize(("first_day", "last_day"), [(-30, -1), (1, 30)], ids=["expired", "not yet valid"])
def test_a_certificate_outside_of_its_days_is_refused(federation, first_day, last_day):
    credentials = federation.authority.issue("bank", first_day=first_day, last_day=last_day)
    words = refusal(federation.site("bank", credentials=credentials))
    assert "it does not accept this site's certificate" in words
    assert "check its dates" in words
    assert still_works(federation)


def test_a_name_that_the_authority_signed_but_the_federation_does_not_have_is_refused(federation):
    words = refusal(federation.site("stranger"))
    assert words == (
        "server: it refused this site: party=stranger: it is not of this federation, which has bank, hospital"
    )
    assert still_works(federation)


def test_one_party_cannot_take_anothers_place(federation):
    hospital = federation.authority.issue("hospital")
    both = PartyMessageAuth(
        identity_of("bank"), identity_of(SERVER).public, "bank", CONTEXT
    )  # even with the bank's key
    assert "party=hospital: what it said is not signed by its pinned identity" in refusal(
        federation.site("hospital", credentials=hospital), auth=both
    )
    own = PartyMessageAuth(identity_of("hospital"), identity_of(SERVER).public, "bank", CONTEXT)
    bank = federation.authority.issue("bank")  # even with the bank's certificate
    assert "party=bank: what it said is not signed by its pinned identity" in refusal(
        federation.site("bank", credentials=bank), auth=own
    )
    assert federation.line.alive == []
    assert still_works(federation)


def test_a_party_cannot_pose_as_the_server(federation):
    line = GrpcServerLink(
        listen=("127.0.0.1", 0),
        credentials=federation.authority.issue("hospital"),
        auth=ServerMessageAuth(identity_of("hospital"), {"bank": identity_of("bank").public}, CONTEXT),
        parties=["bank"],
        patience=60,
    )
    try:
        site = federation.site("bank", address=line.address)
        assert refusal(site) == "server: it has the certificate of hospital; permitted: clinic"
        # With the server's own certificate it would still lack the server's identity.
        assert "server: what it said is not signed by its pinned identity" in refusal(site, server_name="hospital")
    finally:
        line.close()


#: HTTP/2 by hand: the preface, empty SETTINGS, and HEADERS of one call, each as a literal that is not indexed.
_FIELDS = {
    ":method": "POST",
    ":scheme": "https",
    ":path": streams.METHOD,
    ":authority": SERVER,
    "content-type": "application/grpc",
    "te": "trailers",
}
_BLOCK = b"".join(
    b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    for name, value in _FIELDS.items()
)
CALL = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    + len(_BLOCK).to_bytes(3, "big") + bytes([1, 4, 0, 0, 0, 1]) + _BLOCK
)  # fmt: skip


@pytest.mark.parametrize(
    ("version", "words"),
    [(ssl.TLSVersion.TLSv1_2, b"it does not speak TLS 1.3"), (ssl.TLSVersion.TLSv1_3, b"\0\2")],
    ids=["1.2", "1.3, the control: a challenge"],
)
def test_nothing_older_than_tls_1_3_is_spoken(version, words, federation):
    context = party_context(federation.authority.issue("bank"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(federation.line.address, timeout=60) as raw,
        context.wrap_socket(raw) as guest,
    ):
        guest.sendall(CALL)
        heard = b""
        while words not in heard and (more := guest.recv(10_000)):
            heard += more
    assert words in heard
    assert federation.line.alive == []


def test_the_systems_authorities_count_for_nothing(federation):
    (found,) = party_context(federation.authority.issue("bank")).get_ca_certs()
    assert dict(each[0] for each in found["subject"])["commonName"] == "people"


# --- frames of somebody who is in ---


def test_an_old_answer_again_is_not_taken_for_a_new_one(federation):
    with Guest(federation.site("bank")) as guest:
        guest.join()
        heard: list[object] = []
        asking = threading.Thread(target=lambda: heard.extend(_asked(federation, 3)), daemon=True)
        asking.start()
        answers = []
        for _ in range(3):
            answers.append(guest.auth.respond(guest.hear(), echo)[1])
            for answer in answers:  # all that were ever given, the right one last
                guest.say(answer)
        asking.join(timeout=60)
        assert heard == [{0: b"\1question 0"}, {0: b"\1question 1"}, {0: b"\1question 2"}]


def _asked(federation: Federation, count: int) -> list[object]:
    return [
        federation.line.ask({0: b"question %d" % number}, channel=Channel.SETUP).received for number in range(count)
    ]


def test_a_changed_answer_ends_the_connection_and_the_third_one_the_party(federation):
    site = federation.site("bank")
    lost: list[object] = []
    asking = threading.Thread(
        target=lambda: lost.append(federation.line.ask({0: b"x"}, channel=Channel.SETUP).lost), daemon=True
    )
    asking.start()
    auth = site.auth()
    for _ in range(3):
        with Guest(site) as guest:
            guest.auth = auth
            guest.join()
            answer = bytearray(auth.respond(guest.hear(), echo)[1])
            answer[-1] ^= 1
            guest.say(bytes(answer))
            assert guest.is_sent_away()
    asking.join(timeout=60)
    assert lost == [{0: "a message that it did not seal, or that was changed on the way"}]


def test_a_message_above_the_limit_ends_the_stream(tmp_path):
    with Federation(tmp_path, ["bank"], choices={"message_limit": 1000}) as federation:
        for joins in (False, True):
            with Guest(federation.site("bank")) as guest:
                if joins:
                    guest.join()
                guest.say(bytes(1001))
                assert guest.is_sent_away()
        assert until(lambda: federation.line.alive == [])


def test_one_name_has_few_streams_and_others_are_not_kept_out(tmp_path):
    with contextlib.ExitStack() as held:
        # None of them may be sent away for its slowness before the last one has come.
        choices = {"time_limit": 600.0}
        federation = held.enter_context(Federation(tmp_path, ["bank", "hospital"], choices=choices))
        site = federation.site("hospital")
        for _ in range(grpc_server.MOST_JOINING):
            held.enter_context(Guest(site)).hear()  # and does not join
        refused = held.enter_context(Guest(site))
        with pytest.raises(grpc.RpcError, match="4 of this name are joining"):
            refused.hear()
        assert still_works(federation)


def test_a_party_lets_go_of_a_server_whose_messages_are_too_long(federation):
    asking = threading.Thread(target=lambda: _ask_at_length(federation), daemon=True)
    asking.start()
    words = refusal(federation.site("bank"), message_limit=1000)
    assert words.startswith("a message is too long: ")
    assert "(5025 vs. 1000)" in words
    federation.line.close()
    asking.join(timeout=60)


def _ask_at_length(federation: Federation) -> None:
    with contextlib.suppress(LinkError):
        federation.line.ask({0: bytes(5000)}, channel=Channel.SETUP)


#: Frames of 4 MiB. HTTP/2 permits 2^31 - 1 bytes in flight to a stream (RFC 9113, section 6.9.1), less than 512 frames,
#: however the library tunes its windows; two more may be between window and inbox, and at the sender's next write.
FRAME, IN_FLIGHT = 4 << 20, 2**31 // (4 << 20) + 2


def flooded(federation: Federation, count: int) -> tuple[GrpcPartyLink, Outbox]:
    """A party that is at work on a question, and the server's outbox after that many more frames."""
    work, seen = threading.Event(), threading.Event()

    def handle(channel: Channel, body: bytes) -> bytes:
        seen.set()
        work.wait(60)
        return echo(channel, body)

    end = federation.dial("bank", handle)
    threading.Thread(target=lambda: _ask_at_length(federation), daemon=True).start()
    assert seen.wait(60)
    outbox = federation.line._peers[0].stream.outbox
    frame = bytes(FRAME)  # one object, which takes memory once until it is sent
    for _ in range(count):
        streams.event_loop().call_soon_threadsafe(outbox.put, frame)
    federation.releases.append(work.set)
    return end, outbox


def test_a_server_that_floods_a_party_with_questions_fills_no_memory(federation):
    """Read are few; the rest waits at the server, whose library is held back."""
    count = 2 * IN_FLIGHT
    end, outbox = flooded(federation, count)
    assert until(lambda: end._inbox.qsize() == MOST_WAITING)
    assert not until(lambda: end._inbox.qsize() > MOST_WAITING, 3 * streams.HEARTBEAT)
    assert len(outbox._frames) >= count - MOST_WAITING - IN_FLIGHT


def test_a_party_that_holds_nothing_back_takes_every_frame_of_a_flood(federation, monkeypatch):
    """The control: neither the sender nor the library stops at `MOST_WAITING`."""
    monkeypatch.setattr(grpc_party, "MOST_WAITING", 1_000)
    end, outbox = flooded(federation, 3 * MOST_WAITING)
    assert until(lambda: end._inbox.qsize() == 3 * MOST_WAITING)
    assert not outbox._frames


def test_what_a_server_says_in_a_refusal_cannot_move_a_terminal(federation, monkeypatch):
    monkeypatch.setattr(federation.auth, "admit", _refuse_rudely)
    words = refusal(federation.site("bank"))
    assert words.isprintable()
    assert "red" in words


def _refuse_rudely(*_: object) -> None:
    raise LinkError("\x1b[31mred\x07\r\n")


# --- a million frames ---


def test_a_million_made_up_frames_are_all_refused():
    """Chance alone lets one through with probability 1e6 / 2^128."""
    server = ServerMessageAuth(identity_of(SERVER), {"bank": identity_of("bank").public}, CONTEXT)
    party = PartyMessageAuth(identity_of("bank"), identity_of(SERVER).public, "bank", CONTEXT)
    challenge = server.challenge()
    channel = server.admit("bank", challenge, party.join(challenge)).channel
    _, question = channel.question(Channel.PROTOCOL, b"a question")
    _, answer = party.respond(question, echo)
    random = np.random.default_rng(12)
    refused = 0
    for _ in range(20):
        for frame in _made_up(random, 25_000, question):
            try:
                party.respond(frame, _not_reached)
            except LinkError:
                refused += 1
            try:
                channel.answer(frame)
            except LinkError:
                refused += 1
    assert refused == 1_000_000
    assert party.respond(question, _not_reached)[1] == answer  # nothing has changed
    assert channel.answer(answer) is not None


def _made_up(random: np.random.Generator, count: int, known: bytes) -> Iterator[bytes]:
    """Frames of noise, and known ones with some bytes changed, one after the other."""
    lengths = random.integers(0, 60, count)
    noise = random.bytes(int(lengths.sum()))
    at = random.integers(0, len(known), count).tolist()
    change = random.integers(1, 256, count).tolist()
    start = 0
    for index, length in enumerate(lengths.tolist()):
        if index % 2:
            body = bytearray(known)
            body[at[index]] ^= change[index]
        else:
            body = bytearray(noise[start : start + length])
        start += length
        yield bytes(body)


def _not_reached(*_: object) -> bytes:
    raise AssertionError("a made-up question was handled")


def test_noise_instead_of_messages_on_the_socket_harms_nobody(federation):
    random = np.random.default_rng(5)
    for _ in range(50):
        with contextlib.suppress(OSError), socket.create_connection(federation.line.address, timeout=60) as guest:
            guest.sendall(random.bytes(int(random.integers(1, 2000))))
    context = party_context(federation.authority.issue("bank"))
    context.set_alpn_protocols(["h2"])
    for start in (b"", CALL):
        with (
            socket.create_connection(federation.line.address, timeout=60) as raw,
            context.wrap_socket(raw) as guest,
            contextlib.suppress(OSError),
        ):
            guest.sendall(start + random.bytes(5000))
            while guest.recv(10_000):
                pass
    assert still_works(federation)


# --- many, and slow ones ---


@pytest.fixture
def crowded(tmp_path, monkeypatch) -> Iterator[Federation]:
    """A server that few can connect to."""
    monkeypatch.setattr(grpc_server, "MOST_CONNECTIONS", 20)
    with Federation(tmp_path, ["bank", "hospital"], choices={"time_limit": 1.0}) as made:
        yield made


def test_a_flood_of_silent_connections_does_not_keep_a_party_out(crowded):
    with contextlib.ExitStack() as held:
        for _ in range(100):
            guest = socket.socket()
            held.callback(guest.close)
            guest.settimeout(60)
            guest.connect(crowded.line.address)
        assert still_works(crowded)


def test_a_run_goes_on_through_a_flood_of_connections_and_unfinished_streams(crowded):
    over = threading.Event()
    hospital = crowded.site("hospital")
    for name in crowded.names:
        crowded.dial(name, echo)
    crowded.line.join(timeout=60)

    def connect() -> None:
        open_ones: list[socket.socket] = []
        while not over.wait(0.002):
            with contextlib.suppress(OSError):
                open_ones.append(socket.create_connection(crowded.line.address, timeout=1))
            if len(open_ones) > 100:
                open_ones.pop(0).close()
        for each in open_ones:
            each.close()

    def open_streams() -> None:
        while not over.is_set():
            with Guest(hospital) as guest, contextlib.suppress(grpc.RpcError):
                guest.hear()

    threads = [threading.Thread(target=each, daemon=True) for each in (connect, open_streams)]
    for thread in threads:
        thread.start()
    try:
        for number in range(200):
            body = b"%d" % number
            answers = crowded.line.ask({0: body, 1: body}, channel=Channel.SETUP)
            assert answers.received == {0: b"\1" + body, 1: b"\1" + body}
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=60)
    assert crowded.line.num_redials == 0


def test_whoever_is_slow_to_show_who_it_is_is_sent_away(crowded):
    with socket.create_connection(crowded.line.address, timeout=60) as slow:
        with contextlib.suppress(OSError):
            for each in b"\x16\x03\x01\x02\x00\x01" * 20:  # the first bytes of a handshake, one at a time
                slow.sendall(bytes([each]))
                time.sleep(0.02)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1000) == b""
    with Guest(crowded.site("bank")) as slow_guest:  # the handshake is done, the join does not come
        slow_guest.hear()
        assert slow_guest.is_sent_away()
    assert still_works(crowded)

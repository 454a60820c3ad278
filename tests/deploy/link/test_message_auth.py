"""Message authentication between a party and the server: only the right process, in the right order, is accepted."""

from __future__ import annotations

import hashlib
import struct

import pytest
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.message_auth import (
    CHALLENGE_BYTES,
    JOIN_BYTES,
    MOST_UNANSWERED,
    OVERHEAD,
    OtherJob,
    PartyChannel,
    PartyMessageAuth,
    ProcessReplaced,
    ServerMessageAuth,
)
from pbmvfl.errors import LinkError

CLINIC, BANK, HOSPITAL = (Identity.from_private_bytes(bytes([each]) * 32) for each in (1, 2, 3))
PINS = {"bank": BANK.public, "hospital": HOSPITAL.public}
JOB = b"federation, job 1"

bodies = st.binary(max_size=200)
channels = st.sampled_from(list(Channel))


def server_message_auth(context: bytes = JOB) -> ServerMessageAuth:
    return ServerMessageAuth(CLINIC, PINS, context)


def bank_auth(context: bytes = JOB) -> PartyMessageAuth:
    return PartyMessageAuth(BANK, CLINIC.public, "bank", context)


def joined(server: ServerMessageAuth, party: PartyMessageAuth, name: str = "bank") -> PartyChannel:
    challenge = server.challenge()
    return server.admit(name, challenge, party.join(challenge)).channel


def pair() -> tuple[PartyChannel, PartyMessageAuth]:
    party = bank_auth()
    return joined(server_message_auth(), party), party


class Counting:
    """A handler that says what it heard, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, channel: Channel, body: bytes) -> bytes:
        self.count += 1
        return b"%d:%d:" % (self.count, channel) + body


def never(*_: object) -> bytes:
    raise AssertionError("nothing was to be handled")


# --- what goes through ---


@given(st.lists(st.tuples(channels, bodies), max_size=8))
def test_questions_and_answers_arrive_as_they_are(conversation):
    channel, party = pair()
    handle = Counting()
    for count, (where, body) in enumerate(conversation, start=1):
        number, question = channel.question(where, body)
        assert len(question) == len(body) + OVERHEAD
        answered_on, answer = party.respond(question, handle)
        found = channel.answer(answer)
        assert (number, answered_on) == (count, where)
        assert found is not None
        assert (found.number, found.body) == (count, b"%d:%d:" % (count, where) + body)
    assert handle.count == len(conversation)


@given(st.lists(bodies, min_size=1, max_size=5), st.integers(2, 4))
def test_the_same_question_again_gets_the_same_bytes_and_is_handled_once(questions, times):
    channel, party = pair()
    handle = Counting()
    for body in questions:
        _, question = channel.question(Channel.PROTOCOL, body)
        answers = {party.respond(question, handle)[1] for _ in range(times)}
        assert len(answers) == 1
        channel.answer(answers.pop())
    assert handle.count == len(questions)


def test_the_bodies_are_readable_on_the_carriers_inside():
    channel, party = pair()
    _, question = channel.question(Channel.ALIGN, b"what the server says")
    _, answer = party.respond(question, lambda *_: b"what the party says")
    assert b"what the server says" in question
    assert b"what the party says" in answer


# --- keys and MAC by their definitions: HKDF in steps of HMAC (RFC 5869), and keyed BLAKE2b (RFC 7693) ---


def blake2b(text: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=16).digest()


def expected_keys(party: PartyMessageAuth, challenge: bytes) -> tuple[bytes, bytes]:
    """Both directions' keys from their definition: HKDF (RFC 5869) in steps of HMAC."""
    context = hashlib.sha256(JOB).digest()
    server_public = challenge[2 + 32 + 16 :][:32]
    private: X25519PrivateKey = party._private
    secret = private.exchange(X25519PublicKey.from_public_bytes(server_public))
    public = private.public_key().public_bytes_raw()
    label = b"pbmvfl link key\0"
    agreed = struct.pack(">H", PROTOCOL_VERSION) + context + server_public + public + b"bank"

    def mac(key: bytes, text: bytes) -> bytes:
        found = hmac.HMAC(key, hashes.SHA256())
        found.update(text)
        return found.finalize()

    extracted = mac(hashlib.sha256(label + agreed).digest(), secret)
    return mac(extracted, label + b"down\1"), mac(extracted, label + b"up\1")


@given(channels, st.binary(max_size=300), st.binary(max_size=300))
@settings(max_examples=30)
def test_every_mac_and_key_is_the_one_of_the_standards(where, asked, said):
    server, party = server_message_auth(), bank_auth()
    challenge = server.challenge()
    channel = server.admit("bank", challenge, party.join(challenge)).channel
    down, up = expected_keys(party, challenge)
    _, question = channel.question(where, asked)
    _, answer = party.respond(question, lambda *_: said)
    head = struct.pack(">QB", 1, where)
    assert question == head + asked + blake2b(head + asked, down)
    assert answer == head + said + blake2b(head + said, up)


# --- what is refused ---


@given(st.data(), channels, bodies)
def test_any_changed_byte_of_a_question_is_refused_and_nothing_has_happened(data, where, body):
    channel, party = pair()
    _, question = channel.question(where, body)
    changed = bytearray(question)
    changed[data.draw(st.integers(0, len(question) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LinkError, match=r"^server: "):
        party.respond(bytes(changed), never)
    assert party.respond(question, Counting())[0] is where


@given(st.data(), channels, bodies)
def test_any_changed_byte_of_an_answer_is_refused_and_the_true_one_is_taken(data, where, body):
    channel, party = pair()
    _, question = channel.question(where, body)
    _, answer = party.respond(question, Counting())
    changed = bytearray(answer)
    changed[data.draw(st.integers(0, len(answer) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LinkError, match=r"^party=bank: "):
        channel.answer(bytes(changed))
    assert channel.answer(answer) is not None


@given(st.data(), channels, bodies)
def test_a_question_that_is_shorter_or_longer_is_refused(data, where, body):
    channel, party = pair()
    _, question = channel.question(where, body)
    for changed in (
        question[: data.draw(st.integers(0, len(question) - 1))],
        question + data.draw(st.binary(min_size=1)),
    ):
        with pytest.raises(LinkError, match=r"^server: "):
            party.respond(changed, never)


@given(st.permutations(range(4)))
def test_questions_are_answered_in_their_order_alone(order):
    channel, party = pair()
    questions = [channel.question(Channel.PROTOCOL, bytes([index]))[1] for index in range(4)]
    handle, expected = Counting(), 0
    for index in order:
        if index == expected:
            party.respond(questions[index], handle)
            expected += 1
        elif index != expected - 1:
            with pytest.raises(LinkError, match=f"question {index + 1} was asked; permitted: {expected + 1}"):
                party.respond(questions[index], never)
    assert handle.count == expected


@given(st.lists(bodies, min_size=3, max_size=6), st.data())
def test_an_old_question_or_answer_again_has_no_effect(asked, data):
    channel, party = pair()
    questions, answers = [], []
    for body in asked:
        questions.append(channel.question(Channel.PROTOCOL, body)[1])
        answers.append(party.respond(questions[-1], Counting())[1])
        assert channel.answer(answers[-1]) is not None
    replayed = data.draw(st.integers(0, len(asked) - 2))
    with pytest.raises(LinkError, match="or the same again"):
        party.respond(questions[replayed], never)
    number, _ = channel.question(Channel.PROTOCOL, b"the next")
    assert channel.answer(answers[replayed]) is None  # known, and not the answer to anything that waits
    assert number == len(asked) + 1


def counting_anew(channel: PartyChannel) -> PartyChannel:
    """The same keys in the hands of a server that begins with question 1 again."""
    return PartyChannel("bank", channel.public, channel._keys)


@pytest.mark.parametrize("other", [(Channel.PROTOCOL, b"second"), (Channel.SETUP, b"first")])
def test_another_question_or_channel_under_the_same_number_is_refused(other):
    channel, party = pair()
    party.respond(channel.question(Channel.PROTOCOL, b"first")[1], Counting())
    with pytest.raises(LinkError, match="question 1 was asked; permitted: 2"):
        party.respond(counting_anew(channel).question(*other)[1], never)


def test_an_answer_on_another_channel_is_refused():
    channel, party = pair()
    _, question = channel.question(Channel.SETUP, b"x")
    twin = counting_anew(channel)
    _, elsewhere = party.respond(twin.question(Channel.ALIGN, b"x")[1], Counting())
    with pytest.raises(LinkError, match="on channel 3, where it was not asked"):
        channel.answer(elsewhere)
    assert question


def test_an_answer_to_what_was_not_asked_is_refused():
    channel, party = pair()
    twin = counting_anew(channel)
    _, answer = party.respond(twin.question(Channel.ALIGN, b"x")[1], Counting())
    with pytest.raises(LinkError, match="question 1, which was not asked"):
        channel.answer(answer)


def test_an_unknown_channel_is_refused():
    channel, party = pair()
    with pytest.raises(LinkError, match="channel 9 is not known"):
        party.respond(channel.question(9, b"x")[1], never)  # type: ignore[arg-type]


def test_what_goes_one_way_cannot_be_sent_back_the_other_way():
    channel, party = pair()
    _, question = channel.question(Channel.PROTOCOL, b"x")
    with pytest.raises(LinkError, match="did not seal"):
        channel.answer(question)
    _, answer = party.respond(question, Counting())
    with pytest.raises(LinkError, match="did not seal"):
        party.respond(answer, never)


def test_another_partys_answer_is_refused():
    server = server_message_auth()
    hospital = PartyMessageAuth(HOSPITAL, CLINIC.public, "hospital", JOB)
    ours, theirs = joined(server, bank_auth()), joined(server, hospital, "hospital")
    ours.question(Channel.PROTOCOL, b"x")
    _, answer = hospital.respond(theirs.question(Channel.PROTOCOL, b"x")[1], Counting())
    with pytest.raises(LinkError, match="party=bank: a message that it did not seal"):
        ours.answer(answer)


def test_what_was_said_in_another_session_is_refused():
    old_channel, old_party = pair()
    channel, party = pair()
    _, old_question = old_channel.question(Channel.PROTOCOL, b"x")
    channel.question(Channel.PROTOCOL, b"x")
    with pytest.raises(LinkError, match="did not seal"):
        party.respond(old_question, never)
    with pytest.raises(LinkError, match="did not seal"):
        channel.answer(old_party.respond(old_question, Counting())[1])


def test_another_job_is_told_from_another_identity_and_both_sides_values_are_named():
    challenge = server_message_auth(b"federation, job 2").challenge()
    there, here = (hashlib.sha256(each).hexdigest()[:16] for each in (b"federation, job 2", JOB))
    with pytest.raises(OtherJob, match=f"{there} there, {here} here"):
        bank_auth().join(challenge)
    server = server_message_auth()
    challenge = server.challenge()
    stranger = ServerMessageAuth(HOSPITAL, PINS, JOB).challenge()
    with pytest.raises(LinkError, match="not signed by its pinned identity") as refusal:
        bank_auth().join(stranger)
    assert not isinstance(refusal.value, OtherJob)
    with pytest.raises(LinkError, match="party=bank: what it said is not signed"):
        server.admit("bank", challenge, PartyMessageAuth(HOSPITAL, CLINIC.public, "bank", JOB).join(challenge))


def test_a_join_counts_for_one_challenge_and_one_name():
    server, party = server_message_auth(), bank_auth()
    challenge = server.challenge()
    join = party.join(challenge)
    with pytest.raises(LinkError, match="not signed"):
        server.admit("bank", server.challenge(), join)
    with pytest.raises(LinkError, match="not signed"):
        server.admit("hospital", challenge, join)
    with pytest.raises(LinkError, match="party=stranger: it is not of this federation, which has bank, hospital"):
        server.admit("stranger", challenge, join)
    assert server.admit("bank", challenge, join).last == 0


@given(st.data())
def test_any_changed_byte_of_the_handshake_is_refused(data):
    server, party = server_message_auth(), bank_auth()
    challenge = server.challenge()
    change, at = data.draw(st.integers(1, 255)), data.draw(st.integers(0, CHALLENGE_BYTES - 1))
    changed = bytearray(challenge)
    changed[at] ^= change
    with pytest.raises(LinkError, match=r"^server: "):
        bank_auth().join(bytes(changed))
    join = bytearray(party.join(challenge))
    join[data.draw(st.integers(0, JOIN_BYTES - 1))] ^= change
    with pytest.raises(LinkError, match=r"^party=bank: "):
        server.admit("bank", challenge, bytes(join))


@given(st.binary(max_size=300))
def test_whatever_comes_in_the_handshake_the_answer_is_a_link_error(noise):
    server = server_message_auth()
    with pytest.raises(LinkError):
        bank_auth().join(noise)
    with pytest.raises(LinkError):
        server.admit("bank", server.challenge(), noise)


# --- reconnecting ---


def test_the_same_processes_go_on_after_a_reconnect_and_the_answer_has_the_same_bytes():
    server, party = server_message_auth(), bank_auth()
    channel = joined(server, party)
    number, question = channel.question(Channel.PROTOCOL, b"x")
    _, answer = party.respond(question, Counting())  # and the cable is cut: the answer is not heard
    challenge = server.challenge()
    admission = server.admit("bank", challenge, party.join(challenge))
    assert admission.channel is channel
    assert admission.last == number
    (again,) = channel.again(admission.last)
    assert again == question
    assert party.respond(again, never)[1] == answer


def test_what_was_given_up_unanswered_is_heard_in_order_after_a_reconnect():
    server, party = server_message_auth(), bank_auth()
    channel = joined(server, party)
    first = channel.question(Channel.PROTOCOL, b"first")[1]
    second = channel.question(Channel.END, b"second")[1]
    assert channel.again(0) == [first, second]
    party.respond(first, Counting())
    assert channel.again(1) == [first, second]
    party.respond(second, Counting())
    assert channel.again(2) == [second]


def test_the_same_question_asked_again_while_it_waits_is_the_same_bytes():
    channel, party = pair()
    assert channel.question(Channel.SETUP, b"x") == channel.question(Channel.SETUP, b"x")
    assert channel.asked == 1
    assert channel.question(Channel.ALIGN, b"x")[0] == 2
    assert party is not None


def test_questions_without_answers_have_an_end():
    channel, _ = pair()
    for index in range(MOST_UNANSWERED):
        channel.question(Channel.SETUP, bytes([index]))
    with pytest.raises(LinkError, match=r"party=bank: 4 questions have no answer"):
        channel.question(Channel.SETUP, b"one more")


def test_a_new_process_in_the_others_place_is_noticed_on_both_sides():
    server, party = server_message_auth(), bank_auth()
    joined(server, party)
    with pytest.raises(ProcessReplaced, match="party=bank: its process was replaced"):
        joined(server, bank_auth())
    with pytest.raises(ProcessReplaced, match="server: its process was replaced"):
        joined(server_message_auth(), party)


@pytest.mark.parametrize("last", [2, 1 << 63])
def test_a_party_that_claims_to_have_answered_what_was_not_asked_is_refused(last):
    channel, _ = pair()
    channel.question(Channel.SETUP, b"x")
    with pytest.raises(LinkError, match="possible: 0 to 1"):
        channel.again(last)


def test_a_party_that_forgot_what_it_answered_is_refused():
    channel, party = pair()
    channel.answer(party.respond(channel.question(Channel.SETUP, b"x")[1], Counting())[1])
    with pytest.raises(LinkError, match="possible: 1 to 1"):
        channel.again(0)


def test_a_point_of_low_order_makes_no_key():
    """A malicious party could choose it so that the secret is known to everybody."""
    server, party = server_message_auth(), bank_auth()
    challenge = server.challenge()
    said = bytearray(party.join(challenge)[:-64])
    said[-32:] = bytes(32)
    label = b"pbmvfl link join\0" + struct.pack(">H", 4) + b"bank"
    join = bytes(said) + BANK.sign(label + hashlib.sha256(challenge).digest() + bytes(said))
    with pytest.raises(LinkError, match="party=bank: its key is a point of low order"):
        server.admit("bank", challenge, join)


def test_a_handler_that_fails_has_answered_nothing():
    channel, party = pair()
    _, question = channel.question(Channel.SETUP, b"x")
    with pytest.raises(AssertionError):
        party.respond(question, never)
    handle = Counting()
    party.respond(question, handle)
    assert handle.count == 1

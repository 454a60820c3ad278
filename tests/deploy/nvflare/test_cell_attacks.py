"""What others put into NVFlare's cell has no effect on a link: it is dropped, and the owner's log says so.

Every attack is made twice: with the guard that looks at messages before NVFlare decodes them, and without it, where the
checks behind it and the seal must do. No certificates stand in the way here: an attacker may claim any origin, which a
kit's tokens forbid. So the one who carries the messages is an attacker too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.app_common.decomposers import numpy_decomposers
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils import fobs

from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.nvflare.cell_channel import CHANNEL, TOPIC, CellEndpoint, Kind
from support.cell_parties import NAMES, Backbone, CellFederation, Recorder, eventually, expected, recorders


@pytest.fixture(scope="module")
def backbone() -> Iterator[Backbone]:
    opened = Backbone()
    yield opened
    opened.close()


def send_raw(cell: Any, target: str, payload: bytes, **headers: object) -> None:
    """A message with whatever headers, as only somebody with a program of their own would write it."""
    usual = {
        Key.CHANNEL: CHANNEL,
        Key.TOPIC: TOPIC,
        Key.FROM_CELL: cell.get_fqcn(),
        Key.TO_CELL: "server",
        Key.ORIGIN: cell.get_fqcn(),
        Key.DESTINATION: target,
        Key.MSG_TYPE: "req",
        Key.PAYLOAD_ENCODING: "bytes",
    }
    message = Message({**usual, **headers}, payload)
    cell.communicator.send(cell.agents["server"].endpoint, CoreCell.APP_ID, message)


class Scene:
    """A federation in which the insurer lies, and an outsider has a cell of the same job."""

    def __init__(self, federation: CellFederation) -> None:
        self.federation = federation
        self.server = f"server.{federation.job}"
        self.bank = federation.address("bank")
        self.parties = recorders(federation)
        self.insurer = federation.cells["insurer"]
        self.outsider = federation.cell("outsider")

    def passed(self, kind: Kind, *, origin: str = "", target: str = "") -> bytes:
        """The first of these that went through the server's parent."""
        found = (
            each.payload
            for each in self.federation.backbone.passed
            if each.kind is kind and each.origin.startswith(origin) and each.target.startswith(target)
        )
        return next(found)


# --- attacks ---


def answer_for_another_by_return(scene: Scene) -> None:
    """NVFlare credits a RETURN to whom its own headers name."""
    made_up = scene.passed(Kind.ANSWER, origin="insurer")
    original = {Key.DESTINATION: scene.bank, Key.CHANNEL: CHANNEL, Key.TOPIC: TOPIC}
    headers = {Key.MSG_TYPE: "return", Key.ORIGINAL_HEADERS: original, Key.REQ_ID: "1"}
    send_raw(scene.insurer, scene.server, made_up, **headers)


def answer_for_another_by_reply(scene: Scene) -> None:
    made_up = scene.passed(Kind.ANSWER, origin="insurer")
    send_raw(scene.insurer, scene.server, made_up, **{Key.MSG_TYPE: "reply", Key.REQ_ID: "1", Key.ORIGIN: scene.bank})


def answer_for_another_with_a_forged_origin(scene: Scene) -> None:
    send_raw(scene.insurer, scene.server, scene.passed(Kind.ANSWER, origin="insurer"), **{Key.ORIGIN: scene.bank})


def answer_that_was_changed(scene: Scene) -> None:
    answer = bytearray(scene.passed(Kind.ANSWER, origin="bank"))
    answer[-20] ^= 1
    send_raw(scene.insurer, scene.server, bytes(answer), **{Key.ORIGIN: scene.bank})


def join_of_another(scene: Scene) -> None:
    send_raw(scene.insurer, scene.server, scene.passed(Kind.JOIN, origin="insurer"), **{Key.ORIGIN: scene.bank})


def question_of_another_site(scene: Scene) -> None:
    """NVFlare forwards a site's requests to any other site."""
    send_raw(scene.insurer, scene.bank, scene.passed(Kind.QUESTION, target="insurer"))


def question_with_a_forged_origin(scene: Scene) -> None:
    question = scene.passed(Kind.QUESTION, target="insurer")
    send_raw(scene.insurer, scene.bank, question, **{Key.ORIGIN: scene.server})


def challenge_of_another(scene: Scene) -> None:
    challenge = bytearray(scene.passed(Kind.CHALLENGE, target="insurer"))
    challenge[50] ^= 1
    send_raw(scene.insurer, scene.bank, bytes(challenge), **{Key.ORIGIN: scene.server})


def farewell_of_an_outsider(scene: Scene) -> None:
    send_raw(scene.outsider, scene.bank, Kind.BYE.value)
    send_raw(scene.outsider, scene.server, Kind.BYE.value)


def bytes_of_no_kind(scene: Scene) -> None:
    send_raw(scene.insurer, scene.server, b"?" * 100)
    send_raw(scene.insurer, scene.server, b"")


def object_instead_of_bytes(scene: Scene) -> None:
    scene.insurer.fire_and_forget(CHANNEL, TOPIC, scene.server, Message(None, {"loss": [1.0, 2.0]}))


def array_instead_of_bytes(scene: Scene) -> None:
    numpy_decomposers.register()
    scene.insurer.fire_and_forget(CHANNEL, TOPIC, scene.server, Message(None, np.zeros(1000)))


def oversized(scene: Scene) -> None:
    send_raw(scene.insurer, scene.server, Kind.ANSWER.value + bytes(200_000))


def bulk_of_an_outsider(scene: Scene) -> None:
    """Messages in a bulk meet no incoming filter."""
    scene.outsider.queue_message(CHANNEL, TOPIC, scene.bank, Message(None, Kind.BYE.value))


def bulk_of_objects(scene: Scene) -> None:
    scene.insurer.queue_message(CHANNEL, TOPIC, scene.server, Message(None, {"loss": 1.0}))


ATTACKS = [
    answer_for_another_by_return,
    answer_for_another_by_reply,
    answer_for_another_with_a_forged_origin,
    answer_that_was_changed,
    join_of_another,
    question_of_another_site,
    question_with_a_forged_origin,
    challenge_of_another,
    farewell_of_an_outsider,
    bytes_of_no_kind,
    object_instead_of_bytes,
    array_instead_of_bytes,
    oversized,
    bulk_of_an_outsider,
    bulk_of_objects,
]


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_dropped_and_logged_and_nothing_else(backbone, monkeypatch, caplog, attack, is_guarded):
    caplog.set_level(logging.WARNING)
    if not is_guarded:
        monkeypatch.setattr(CellEndpoint, "_guard", lambda *_: None)
    with CellFederation(backbone, patience=60.0, frame_limit=100_000) as federation:
        scene = Scene(federation)
        assert dict(federation.link.exchange(b"round 1", timeout=60).received) == expected(b"round 1")
        received = len(caplog.records)
        attack(scene)
        for number in range(2, 5):  # while it arrives, and after
            body = b"round %d" % number
            answers = federation.link.exchange(body, timeout=60)
            assert (dict(answers.received), dict(answers.lost)) == (expected(body), {})
        # What is meant for the server is looked at when it asks next, at the latest.
        eventually(lambda: len(caplog.records) > received or not federation.link.exchange(b"once more", timeout=60))
        for recorder in scene.parties.values():
            rounds = [body for _, body in recorder.seen if body != b"once more"]
            assert rounds == [b"round %d" % number for number in range(1, 5)]
        assert set(federation.link.alive) == set(NAMES)
        assert federation.errors == {}
        if is_guarded:
            assert any(each.getMessage().startswith("dropped: ") for each in caplog.records[received:])


# --- controls: the same weapons do hit what is not protected ---


def test_a_return_is_credited_to_another_party_by_nvflare_itself(backbone):
    """So the link uses no replies of NVFlare's. If this fails, NVFlare has changed, and attacks prove less."""
    with CellFederation(backbone) as federation:
        bank, insurer = federation.cell("bank"), federation.cell("insurer")
        may_answer = threading.Event()

        def honest(_: Message) -> Message:
            assert may_answer.wait(60)
            return Message(None, b"the bank's")

        def liar(message: Message) -> Message:
            headers = {
                Key.MSG_TYPE: "return",
                Key.ORIGINAL_HEADERS: {Key.DESTINATION: bank.get_fqcn()},
                Key.REQ_ID: message.get_header(Key.REQ_ID),
                Key.CHANNEL: "bare",
            }
            send_raw(insurer, federation.server_cell.get_fqcn(), b"made up", **headers)
            return Message(None, b"the insurer's")

        bank.register_request_cb("bare", "ask", honest)
        insurer.register_request_cb("bare", "ask", liar)
        targets = [bank.get_fqcn(), insurer.get_fqcn()]
        replies = federation.server_cell.broadcast_request("bare", "ask", targets, Message(None, b"?"), timeout=30)
        may_answer.set()
        assert bytes(replies[bank.get_fqcn()].payload) == b"made up"


def test_objects_are_not_even_decoded_where_nvflare_would_decode_them(backbone, monkeypatch):
    decoded: list[str] = []
    loads = fobs.loads
    monkeypatch.setattr(fobs, "loads", lambda *args, **kwargs: decoded.append("once") or loads(*args, **kwargs))
    with CellFederation(backbone) as federation:
        scene = Scene(federation)
        arrived = threading.Event()
        federation.server_cell.register_request_cb("other", "topic", lambda _: arrived.set())
        object_instead_of_bytes(scene)
        array_instead_of_bytes(scene)
        assert dict(federation.link.exchange(b"round 1", timeout=60).received) == expected(b"round 1")
        assert decoded == []
        scene.insurer.fire_and_forget("other", "topic", scene.server, Message(None, {"a": 1}))
        assert arrived.wait(60)
        assert decoded == ["once"]


@pytest.mark.parametrize(
    "headers", [{Key.CONN_URL: "tcp://127.0.0.1:9"}, {Key.SECURE: True, Key.ENCRYPTED: True}], ids=["dial", "exchange"]
)
def test_a_message_cannot_make_a_site_dial_or_exchange_certificates(backbone, caplog, headers):
    caplog.set_level(logging.WARNING)
    with CellFederation(backbone) as federation:
        scene = Scene(federation)
        send_raw(scene.insurer, scene.server, Kind.HELLO.value, **headers)
        eventually(lambda: "asks for" in caplog.text)
        assert federation.server_cell.adhoc_connectors == {}


def test_a_reply_of_the_same_question_replayed_later_is_no_answer_to_the_next_one(backbone):
    with CellFederation(backbone) as federation:
        scene = Scene(federation)
        federation.link.exchange(b"round 1", timeout=60)
        old_answer = scene.passed(Kind.ANSWER, origin="bank")
        old_question = scene.passed(Kind.QUESTION, target="bank")
        scene.parties["bank"].may_go_on.clear()
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(federation.link.exchange(b"round 2")), daemon=True)
        asking.start()
        eventually(lambda: len(scene.parties["bank"].seen) == 2)
        for _ in range(5):
            send_raw(scene.insurer, scene.server, old_answer, **{Key.ORIGIN: scene.bank})
            send_raw(scene.insurer, scene.bank, old_question, **{Key.ORIGIN: scene.server})
        scene.parties["bank"].may_go_on.set()
        asking.join(timeout=60)
        assert dict(answers[0].received) == expected(b"round 2")
        answers.append(federation.link.exchange(b"round 3", timeout=60))
        assert dict(answers[1].received) == expected(b"round 3")
        seen = [body for channel, body in scene.parties["bank"].seen if channel is Channel.PROTOCOL]
        assert seen == [b"round 1", b"round 2", b"round 3"]


def test_a_stranger_cannot_fill_the_log(backbone, caplog):
    caplog.set_level(logging.WARNING)
    with CellFederation(backbone) as federation:
        scene = Scene(federation)
        federation.link.exchange(b"round 1", timeout=60)
        for _ in range(200):
            send_raw(scene.outsider, scene.server, Kind.HELLO.value)
            answer_for_another_with_a_forged_origin(scene)
        eventually(lambda: "no more of these are written" in caplog.text)
        assert dict(federation.link.exchange(b"round 2", timeout=60).received) == expected(b"round 2")
        assert caplog.text.count("dropped: ") == 20


def test_filters_of_nvflare_for_all_channels_still_count(backbone):
    """A filter of one channel takes the place of those of all, where NVFlare checks tokens: the guard calls them."""
    with CellFederation(backbone, patience=2.0) as federation:
        seen: list[Message] = []
        federation.server_cell.add_incoming_filter("*", "*", lambda message: seen.append(message) or message)
        federation.add("bank", Recorder("bank"))
        assert dict(federation.link.ask({0: b"round 1"}, channel=Channel.PROTOCOL).received) == {}
        assert seen

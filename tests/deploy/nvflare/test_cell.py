"""NVFlare's cell carries what the line carries: what is lost on the way is asked for again, and is handled once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.nvflare.cell_channel import Kind
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.federation.party_setup import PartySetup
from support.cell_parties import (
    AGAIN_AFTER,
    NAMES,
    Backbone,
    CellFederation,
    CellThreads,
    Recorder,
    eventually,
    expected,
    recorders,
)
from support.transport_conformance import TransportConformance


@pytest.fixture(scope="module")
def backbone() -> Iterator[Backbone]:
    opened = Backbone()
    yield opened
    opened.close()


class TestCell(TransportConformance):
    @pytest.fixture(autouse=True)
    def _cells(self, backbone, request):
        self.backbone = backbone
        # A party that vanished is not told from one that is cut off: it is lost when the patience is over.
        self.patience = 3.0 if "lost" in request.node.name else 60.0

    def open(self, parties: Sequence[PartySetup]) -> CellThreads:
        return CellThreads(self.backbone, parties, patience=self.patience)

    def lose(self, transport: CellThreads, party: int) -> None:
        transport.lose(party)

    def hold(self, transport: CellThreads, party: int) -> None:
        transport.hold(party, still=True)

    def release(self, transport: CellThreads, party: int) -> None:
        transport.hold(party, still=False)


@pytest.fixture
def federation(backbone) -> Iterator[CellFederation]:
    with CellFederation(backbone) as opened:
        yield opened


def first(number: int, kind: Kind, site: str) -> Callable[..., bool]:
    """Loses so many messages of a kind from or to a site."""
    left = [number]

    def loses(passing) -> bool:
        hit = passing.kind is kind and site in (passing.origin.split(".")[0], passing.target.split(".")[0])
        left[0] -= hit
        return hit and left[0] >= 0

    return loses


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.CHALLENGE, Kind.JOIN])
def test_a_party_joins_although_what_it_says_first_is_lost(federation, kind):
    federation.backbone.loses = first(2, kind, "bank")
    recorders(federation)
    assert set(federation.link.alive) == set(NAMES)


@pytest.mark.parametrize("kind", [Kind.QUESTION, Kind.ANSWER])
def test_what_is_lost_on_the_way_is_asked_for_again_and_handled_once(federation, kind):
    parties = recorders(federation)
    federation.backbone.loses = first(2, kind, "bank")
    answers = federation.link.exchange(b"round 1", timeout=60)
    assert (dict(answers.received), dict(answers.lost)) == (expected(b"round 1"), {})
    assert parties["bank"].seen == [(Channel.PROTOCOL, b"round 1")]


def test_a_slow_party_is_probed_and_not_sent_the_question_again(federation):
    parties = recorders(federation)
    parties["bank"].may_go_on.clear()
    asked = threading.Thread(target=federation.link.exchange, args=(b"x" * 100_000,), daemon=True)
    asked.start()
    bank = federation.address("bank")
    eventually(lambda: federation.count(Kind.PROBE, target=bank) >= 4)
    assert "bank" in federation.link.alive  # it says that it works
    parties["bank"].may_go_on.set()
    asked.join(timeout=60)
    assert not asked.is_alive()
    assert federation.count(Kind.QUESTION, target=bank) == 1
    assert len(parties["bank"].seen) == 1


def test_a_question_that_comes_twice_while_it_is_worked_on_is_handled_once(federation):
    parties = recorders(federation)
    parties["bank"].may_go_on.clear()
    with pytest.raises(AssertionError, match="within"):
        raise AssertionError(federation.link.exchange(b"round 1", timeout=0.5).lost[0])
    # Asked again, it is the same question: the party gets its bytes a second time.
    asked = threading.Thread(target=federation.link.exchange, args=(b"round 1",), daemon=True)
    asked.start()
    eventually(lambda: federation.count(Kind.QUESTION, target=federation.address("bank")) >= 2)
    parties["bank"].may_go_on.set()
    asked.join(timeout=60)
    assert parties["bank"].seen == [(Channel.PROTOCOL, b"round 1")]


def test_a_question_that_was_given_up_is_answered_before_the_next_one(federation):
    parties = recorders(federation)
    federation.backbone.loses = first(1, Kind.QUESTION, "bank")
    assert "no answer within 0.2 seconds" in federation.link.exchange(b"round 1", timeout=0.2).lost[0]
    answers = federation.link.exchange(b"round 2", timeout=60)
    assert dict(answers.received) == expected(b"round 2")
    assert [body for _, body in parties["bank"].seen] == [b"round 1", b"round 2"]


def test_a_cut_that_is_mended_within_the_patience_is_not_seen_even_if_it_is_longer_than_the_timeout(federation):
    recorders(federation)
    lost = []

    def cut(passing) -> bool:
        is_cut = federation.address("bank") in (passing.origin, passing.target) and lost.count(Kind.PROBE) < 8
        lost.extend([passing.kind] * is_cut)
        return is_cut

    federation.backbone.loses = cut
    answers = federation.link.exchange(b"round 1", timeout=5 * AGAIN_AFTER)
    assert lost.count(Kind.PROBE) == 8  # one every AGAIN_AFTER: the cut outlasts the timeout
    assert dict(answers.received) == expected(b"round 1")


def test_a_silent_party_is_lost_when_the_patience_is_over_and_is_not_alive(backbone):
    with CellFederation(backbone, patience=2.0) as federation:
        recorders(federation)
        bank = federation.address("bank")
        backbone.loses = lambda passing: bank in (passing.origin, passing.target)
        answers = federation.link.exchange(b"round 1", timeout=600)
        assert answers.lost == {0: "no word within 2 seconds: its process ended, or it is cut off"}
        assert set(answers.received) == {1, 2}
        assert set(federation.link.alive) == {"hospital", "insurer"}


def test_a_party_that_leaves_is_lost_without_waiting_for_the_patience(federation):
    recorders(federation)
    federation.ends[0].close()
    assert federation.link.exchange(b"round 1", timeout=600).lost == {0: "it left before it answered"}


def test_parties_end_with_the_server_and_say_so(federation):
    recorders(federation)
    federation.link.close()
    federation.wait()
    assert federation.errors == dict.fromkeys(NAMES, "server: it left before the work was over")
    with pytest.raises(LinkError, match="closed"):
        federation.link.exchange(b"round 1")


def test_the_last_answer_can_be_asked_for_again_and_then_parties_leave_in_peace(federation):
    parties = recorders(federation)
    federation.backbone.loses = first(2, Kind.ANSWER, "bank")
    answers = federation.link.ask(dict.fromkeys(range(3), b"done"), channel=Channel.END, timeout=60)
    assert dict(answers.received) == expected(b"done")
    federation.link.close()
    federation.wait()
    assert federation.errors == {}
    assert parties["bank"].seen == [(Channel.END, b"done")]


def test_megabytes_travel_both_ways(federation):
    recorders(federation)
    large = bytes(range(256)) * 20_000
    assert dict(federation.link.exchange(large, timeout=60).received) == expected(large)


def test_a_question_above_the_limit_is_refused_before_it_is_sent(backbone):
    refused = pytest.raises(LinkError, match="1,000 bytes; permitted: at most 975")
    with CellFederation(backbone, frame_limit=1000) as federation, refused:
        federation.link.exchange(b"x" * 1000)


def test_a_party_that_does_not_come_is_named(backbone):
    with CellFederation(backbone) as federation:
        federation.add("bank", Recorder("bank"))
        federation.add("insurer", Recorder("insurer"))
        with pytest.raises(PartyLost, match="hospital did not join within 1 seconds") as lost:
            federation.link.join(timeout=1)
        assert set(lost.value.reasons) == {1}


def test_parties_that_wait_for_others_do_not_chatter(backbone):
    with CellFederation(backbone) as federation:
        federation.add("bank", Recorder("bank"))
        began = time.monotonic()
        with pytest.raises(PartyLost):
            federation.link.join(timeout=1.5)
        most = (time.monotonic() - began) / AGAIN_AFTER + 2
        assert 1 <= federation.count(Kind.HELLO, target=f"server.{federation.job}") <= most
        assert 1 <= federation.count(Kind.CHALLENGE, target=federation.address("bank")) <= 2 * most


def test_a_party_without_the_pinned_identity_is_not_let_in(backbone):
    with CellFederation(backbone, ("bank", "hospital")) as federation:
        federation.add("bank", Recorder("bank"))
        federation.add("hospital", Recorder("hospital"), identity="bank")
        with pytest.raises(PartyLost, match="refused: party=hospital: what it said is not signed by its pinned"):
            federation.link.join(timeout=1.5)


def test_a_party_of_another_federation_ends_at_once_and_both_sides_know_why(backbone):
    with CellFederation(backbone, ("bank", "hospital")) as federation:
        federation.add("bank", Recorder("bank"))
        federation.add("hospital", Recorder("hospital"), context=b"federation, job 2")
        with pytest.raises(
            PartyLost, match="hospital left before it joined; it was last refused: server: it is in anoth"
        ):
            federation.link.join(timeout=600)
        eventually(lambda: "hospital" in federation.errors)
        assert "it is in another job, or has another federation.toml" in federation.errors["hospital"]


def test_a_second_process_of_a_party_is_found_out(federation):
    recorders(federation)
    federation.cells["bank"].stop()
    eventually(lambda: federation.address("bank") not in federation.backbone.root.agents)
    federation.add("bank", Recorder("bank"))
    assert federation.link.exchange(b"round 1", timeout=600).lost == {0: "its process was replaced"}

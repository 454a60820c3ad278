"""Private alignment: the right rows, the same order everywhere, and nothing else in the messages."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.deploy.alignment import psi
from pbmvfl.deploy.alignment.messages import LONGEST_WORDS, Begin, Kind, OrderKey, Question, refused
from pbmvfl.deploy.alignment.party import PartySideAlignment
from pbmvfl.deploy.alignment.row_ids import IdForm, RowIds, order_proof
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.errors import AlignmentError, PartyLost
from pbmvfl.protocol.transport import Answers
from support.alignment_runs import NAME, AlignmentRun, MemoryLink, align, hmac_of_order

pytest.importorskip("private_set_intersection.python")

PEOPLE = [f"person-{number:04d}" for number in range(60)]


# --- the result ---


@given(
    lists=st.lists(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=12, unique=True),
        min_size=3,
        max_size=5,
    ),
    shared=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), max_size=8, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_the_result_is_what_sets_would_give_and_all_have_it_in_one_order(lists, shared):
    own, *parties = [list(dict.fromkeys([*each, *shared])) for each in lists]
    run = AlignmentRun({f"party-{number}": ids for number, ids in enumerate(parties)})
    expected = set(own).intersection(*parties)
    if not expected:
        with pytest.raises(AlignmentError, match=r"none of the label holder's|are at all parties"):
            run.align(own)
        assert not run.kept
        return
    alignment = run.align(own)
    order = [own[row] for row in alignment.rows]
    assert sorted(order) == sorted(expected)
    assert alignment.rows.dtype == np.int64
    assert alignment.digest == hmac_of_order(alignment.key, order)
    for number, ids in enumerate(parties):
        party = f"party-{number}"
        assert [ids[row] for row in run.kept[party].rows] == order
        assert (run.kept[party].key, run.kept[party].digest) == (alignment.key, alignment.digest)
        record = alignment.parties[party]
        assert (record.count, record.kinds, record.common) == (len(ids), "ucg", len(set(own) & set(ids)))


def test_lists_of_many_chunks_are_aligned(monkeypatch):
    for module in ("alignment.psi", "alignment.coordinator", "alignment.party"):
        monkeypatch.setattr(f"pbmvfl.deploy.{module}.CHUNK", 7)
    monkeypatch.setattr("pbmvfl.deploy.alignment.coordinator.ORDER_CHUNK", 4)
    run = AlignmentRun({"bank": PEOPLE[10:], "shop": [*PEOPLE[::-2], "only-here"]})
    seen: list[tuple[int, int]] = []
    alignment = run.align(PEOPLE[:50], progress=lambda done, total: seen.append((done, total)))
    assert {PEOPLE[row] for row in alignment.rows} == set(PEOPLE[11:50:2])
    assert run.ordered("bank") == run.ordered("shop") == [PEOPLE[row] for row in alignment.rows]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_the_order_is_another_every_time():
    """Two random orders of 60 rows are alike with probability 1/60!."""
    orders = []
    for _ in range(2):
        run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
        orders.append(run.align(PEOPLE).rows.tolist())
    assert orders[0] != orders[1]
    assert orders[0] != list(range(60))
    assert orders[1] != list(range(60))


def test_integers_and_text_that_is_spelled_like_them_go_together():
    run = AlignmentRun({"bank": [3, 1, 2], "shop": ["2", "3", "4"]})
    assert {row + 1 for row in run.align([1, 2, 3]).rows} == {2, 3}


# --- the proof of the order ---


def test_only_the_same_order_of_the_same_alignment_proves_itself():
    first, second = (AlignmentRun({"bank": PEOPLE, "shop": PEOPLE}) for _ in range(2))
    alignment, other = first.align(PEOPLE), second.align(PEOPLE)

    def proof(order, challenge, party):
        return order_proof(key=order.key, digest=order.digest, challenge=challenge, party=party)

    wanted = proof(alignment, b"c" * 32, "bank")
    assert proof(first.kept["bank"], b"c" * 32, "bank") == wanted
    assert proof(second.kept["bank"], b"c" * 32, "bank") == proof(other, b"c" * 32, "bank") != wanted
    assert proof(first.kept["bank"], b"d" * 32, "bank") != wanted
    assert proof(first.kept["shop"], b"c" * 32, "shop") != wanted
    swapped = hmac_of_order(alignment.key, [PEOPLE[row] for row in alignment.rows[::-1]])
    assert order_proof(key=alignment.key, digest=swapped, challenge=b"c" * 32, party="bank") != wanted


# --- what is in the messages ---


def traces_of(text: str) -> list[bytes]:
    """An id as it is, and what somebody who can guess it would look for."""
    raw = text.encode()
    traces = [raw, text.encode("utf-16-le"), raw.hex().encode()]
    for name in ("sha256", "sha1", "md5", "sha512", "blake2b", "blake2s", "sha3_256"):
        digest = hashlib.new(name, raw).digest()
        traces += [digest[:16], digest.hex()[:32].encode(), digest[::-1][:16]]
    return traces


def test_no_id_and_no_hash_of_one_without_a_key_is_in_any_message():
    run = AlignmentRun({"bank": PEOPLE[:40], "shop": PEOPLE[20:]})
    alignment = run.align(PEOPLE[10:50])
    crossed = run.link.all_bytes
    for text in PEOPLE:
        for trace in traces_of(text):
            assert trace not in crossed
    assert alignment.key not in crossed  # it is sealed
    assert NAME.encode() in crossed  # the search finds what is there


def test_the_keyed_digests_of_one_party_say_nothing_to_another():
    """Both get the same order, and no sealed part nor point of one occurs at the other."""
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    run.align(PEOPLE)
    parts = {
        party: [q for name, q, _ in run.link.crossed if name == party and q[1] in (Kind.ORDER, Kind.AGREE)]
        for party in ("bank", "shop")
    }
    assert [len(q) for q in parts["bank"]] == [len(q) for q in parts["shop"]]
    chunks = {
        party: {q[at : at + 16] for q in each for at in range(6, len(q) - 16, 16)} for party, each in parts.items()
    }
    assert not chunks["bank"] & chunks["shop"]


def test_sizes_of_messages_depend_on_the_numbers_of_ids_alone():
    """Two worlds with the same counts, other ids, another overlap: the same sizes until the order is told."""

    def sizes(own, bank):
        run = AlignmentRun({"bank": bank, "shop": own})
        run.align(own)
        return [(q[1], len(q), len(a)) for _, q, a in run.link.crossed if q[1] not in (Kind.ORDER, Kind.AGREE)]

    long = ["x" * 200 + text for text in PEOPLE]
    assert sizes(PEOPLE[:30], PEOPLE[20:50]) == sizes(long[10:40], long[39:60] + PEOPLE[:9])


def test_a_party_learns_how_many_ids_there_are_and_which_of_its_own_rows_are_common():
    """All that it was told, decrypted with its own keys, is a function of that and of random numbers."""
    opened: list[bytes] = []
    tags: list[set[bytes]] = []

    class Noting(PartySideAlignment):
        def _receive_order(self, question, begin):
            opened.append(self._shared.open(question))
            tags.append({self._shared.tag(text) for text in PEOPLE[20:40]})
            return super()._receive_order(question, begin)

    run = AlignmentRun({"bank": PEOPLE[:40], "shop": PEOPLE[20:]}, bank=Noting)
    run.align(PEOPLE[10:50])
    questions = [q for name, q, _ in run.link.crossed if name == "bank"]
    assert [q[1] for q in questions] == [Kind.BEGIN, Kind.SETUP, Kind.REQUEST, Kind.ORDER, Kind.AGREE, Kind.KEEP]
    assert struct.unpack_from("<Q", questions[0], 6) == (40,)  # how many ids the label holder has
    assert len(questions[2]) == 6 + 40 * 33  # a point for each
    assert len(opened[0]) == 20 * 16  # a digest for each common row: of 30 that bank has, 20 are at shop too
    assert {opened[0][at : at + 16] for at in range(0, 320, 16)} == tags[0]


# --- refusals ---


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a", "b", "a", "a"], "2 of 4 rows have an id that an earlier row has"),
        (["a", None, ""], "2 of 3 rows have no id"),
        ([None, None], "2 of 2 rows have no id"),
        ([], "no rows"),
        ([1.5, 2.0], "type double"),
        ([True, False], "type bool"),
    ],
)
def test_ids_that_cannot_be_used_are_refused_with_counts_and_without_an_id(values, words):
    with pytest.raises(AlignmentError, match=words):
        RowIds.of(pa.array(values))


def test_an_error_about_repeated_ids_does_not_show_them():
    with pytest.raises(AlignmentError) as caught:
        RowIds.of(pa.array(["secret-1", "secret-1"]), where="bank.csv")
    assert "secret" not in str(caught.value)
    assert "bank.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (["7", "-8", "0"], IdForm.DIGITS),
        (["007", "8"], IdForm.WORDS),
        (["7 "], IdForm.WORDS),
        (["7\n"], IdForm.WORDS),
        ([7], IdForm.WHOLE_NUMBERS),
    ],
)
def test_forms_of_ids(values, form):
    assert RowIds.of(pa.array(values)).form is form


@pytest.mark.parametrize("own_are_numbers", [True, False])
def test_words_at_one_and_integers_at_the_other_are_refused(own_are_numbers):
    numbers, words = [7, 8], ["007", "008"]
    own, theirs = (numbers, words) if own_are_numbers else (words, numbers)
    run = AlignmentRun({"bank": theirs, "shop": own})
    with pytest.raises(AlignmentError, match=r"bank refused: its ids are .*; store them in one type"):
        run.align(own)
    assert not run.kept


def test_a_party_that_has_none_of_the_ids_is_named():
    run = AlignmentRun({"bank": PEOPLE, "shop": ["else-1", "else-2"]})
    with pytest.raises(AlignmentError, match=r"^shop: none of the label holder's 60 ids is there; check"):
        run.align(PEOPLE)
    assert not run.kept
    assert Kind.ORDER not in [q[1] for _, q, _ in run.link.crossed]


def test_lost_leading_zeros_are_suspected():
    run = AlignmentRun({"bank": ["7", "8"], "shop": ["007", "008"]})
    with pytest.raises(AlignmentError, match=r"bank: none .* were leading zeros lost\?"):
        run.align(["007", "008"])


def test_an_intersection_that_is_empty_only_for_all_together_says_so():
    run = AlignmentRun({"bank": PEOPLE[:30], "shop": PEOPLE[30:]})
    with pytest.raises(AlignmentError, match=r"0 of .* 60 ids are at all parties \(bank has 30 of them, shop has 30"):
        run.align(PEOPLE)
    assert not run.kept


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"most_ids": 59}, "the label holder has 60 ids; its owner's policy permits 59"),
        ({"least_rows": 61}, "60 rows are common; its owner's policy wants 61"),
    ],
)
def test_an_owner_s_limits_are_kept(limits, words):
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE}, **limits)
    with pytest.raises(AlignmentError, match=words):
        run.align(PEOPLE)
    assert not run.kept


def test_a_party_that_says_it_has_more_ids_than_can_be_looked_at_is_refused():
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    with pytest.raises(AlignmentError, match="party=bank: it says that it has 60 ids; permitted: 59"):
        align(run.link, PEOPLE, most_ids=59)
    assert [question[1] for _, question, _ in run.link.crossed] == [Kind.BEGIN] * 2
    for side in run.sides.values():
        side.close()


def test_an_alignment_of_another_name_than_the_owner_expects_is_refused():
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    with pytest.raises(AlignmentError, match="name='others': this party is here for 'people'"):
        run.align(PEOPLE, name="others")


def test_a_party_that_cannot_begin_says_why():
    words = "its table cannot be used; its owner's log says why"
    link = MemoryLink({"bank": lambda *_: refused(words), "shop": lambda *_: refused("x")})
    with pytest.raises(AlignmentError, match=r"bank refused: its table cannot be used.*; party=shop refused: x"):
        align(link, PEOPLE)


def test_a_lost_party_ends_the_alignment():
    class Lossy(MemoryLink):
        def ask(self, questions, *, channel, timeout=None):
            answers = super().ask(questions, channel=channel, timeout=timeout)
            return Answers({0: answers.received[0]}, {1: "its process has ended"})

    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    run.link.__class__ = Lossy
    with pytest.raises(PartyLost, match="its process has ended"):
        run.align(PEOPLE)


# --- adversaries ---


def test_a_second_request_for_the_same_chunk_is_refused_and_ends_the_alignment():
    """Else a label holder could have more ids looked up than it said at the beginning."""
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    bank, client = run.sides["bank"], psi.PsiClient()
    asked: list[bytes] = []

    def also_guess(party, data):
        if party == "bank" and data[1] == Kind.ORDER:
            guess = Question(Kind.REQUEST, 0, client.request(lambda: [f"guess-{n}" for n in range(60)]).result())
            asked.append(bank.receive(guess.to_bytes()))
        return data

    run.link.on_question = also_guess
    with pytest.raises(AlignmentError, match="over; begin another"):
        run.align(PEOPLE)
    client.close()
    assert b"was asked before" in asked[0]
    assert not run.kept


@pytest.mark.parametrize("kind", [Kind.ORDER, Kind.AGREE, Kind.BEGIN])
def test_a_question_that_was_changed_on_its_way_is_refused_and_nothing_is_kept(kind):
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    run.link.on_question = lambda party, data: (
        data[:-1] + bytes([data[-1] ^ 1]) if data[1] == kind and party == "bank" else data
    )
    with pytest.raises(AlignmentError, match="bank"):
        run.align(PEOPLE)
    assert "bank" not in run.kept
    assert "shop" not in run.kept


@pytest.mark.parametrize("kind", [Kind.SETUP, Kind.REQUEST, Kind.AGREE, Kind.BEGIN])
def test_an_answer_that_was_cut_short_is_refused(kind):
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    last = []
    run.link.on_question = lambda _, data: (last.append(data[1]), data)[1]
    run.link.on_answer = lambda party, data: data[:-1] if last[-1] == kind and party == "bank" else data
    with pytest.raises(AlignmentError, match="bank"):
        run.align(PEOPLE)
    assert not run.kept


def test_a_response_whose_points_are_none_is_refused_by_name():
    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE})
    last = []
    run.link.on_question = lambda _, data: (last.append(data[1]), data)[1]
    run.link.on_answer = lambda party, data: (
        b"\0" + b"\xff" * (len(data) - 1) if last[-1] == Kind.REQUEST and party == "shop" else data
    )
    with pytest.raises(AlignmentError, match="party=shop: a response has a point that is not on the curve"):
        run.align(PEOPLE)


def test_an_order_with_a_row_that_the_party_lacks_is_refused(monkeypatch):
    """What a false match would lead to; there are none, so one is made up."""
    run = AlignmentRun({"bank": PEOPLE[:59], "shop": PEOPLE})
    real = psi.PsiClient._matches
    monkeypatch.setattr(
        psi.PsiClient, "_matches", lambda self, setup, points: list(range(len(real(self, setup, points)) and 60))
    )
    with pytest.raises(
        AlignmentError, match=r"bank refused: .*more than both sides can share|rows that this party lacks"
    ):
        run.align(PEOPLE)
    run = AlignmentRun({"bank": [*PEOPLE[:59], "else"], "shop": PEOPLE})
    with pytest.raises(AlignmentError, match="bank refused: the order has rows that this party lacks"):
        run.align(PEOPLE)
    assert not run.kept


def test_a_party_with_another_order_is_found_before_anybody_keeps_anything():
    class Swapping(PartySideAlignment):
        def _receive_order(self, question, begin):
            answer = super()._receive_order(question, begin)
            self._rows[-1] = self._rows[-1][::-1]
            return answer

    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE}, bank=Swapping)
    with pytest.raises(AlignmentError, match="party=bank: its order is another"):
        run.align(PEOPLE)
    assert not run.kept


def test_a_refusal_s_words_are_bounded_and_printable():
    link = MemoryLink({"bank": lambda *_: b"\1\x1b[2Jclear\n", "shop": lambda *_: b"\1" + b"x" * (LONGEST_WORDS + 1)})
    with pytest.raises(AlignmentError) as caught:
        align(link, PEOPLE)
    assert "?[2Jclear?" in str(caught.value)
    assert "no answer" in str(caught.value)


def test_a_party_whose_disk_fails_refuses_without_showing_a_path():
    def full(_):
        raise OSError("/home/bank/private/rows.arrow: no space left")

    run = AlignmentRun({"bank": PEOPLE, "shop": PEOPLE}, keep=full)
    with pytest.raises(AlignmentError, match="bank refused: something failed at this party") as caught:
        run.align(PEOPLE)
    assert "private" not in str(caught.value)
    assert "private" not in run.link.all_bytes.decode(errors="replace")
    assert isinstance(run.sides["bank"].last_error, OSError)


@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_a_party_answers_any_bytes_with_a_refusal(data):
    run = AlignmentRun({"bank": PEOPLE[:3]})
    answer = run.sides["bank"](Channel.ALIGN, data)
    assert answer[:1] == b"\1"
    assert len(answer) <= 1 + LONGEST_WORDS
    assert run.sides["bank"](Channel.PROTOCOL, data)[:1] == b"\1"


@given(
    kind=st.sampled_from(list(Kind)),
    number=st.integers(0, 2**32 - 1) | st.integers(0, 2),
    body=st.binary(max_size=150) | st.sampled_from([b"", b"\x02" * 33, b"\x02" * 99]),
)
@settings(max_examples=100, deadline=None)
def test_a_party_that_has_begun_answers_anything_and_keeps_nothing(kind, number, body):
    """It answers a part of its setup, and points that are on the curve, as many as were said; nothing else."""
    run = AlignmentRun({"bank": PEOPLE[:3]})
    bank = run.sides["bank"]
    begin = Begin(name=NAME, count=3, form=IdForm.WORDS, share=OrderKey().share)
    assert bank.receive(Question(Kind.BEGIN, body=begin.to_body()).to_bytes())[:1] == b"\0"
    answer = bank.receive(Question(kind, number, body).to_bytes())
    bank.close()
    asks_setup = (kind, number, body) == (Kind.SETUP, 0, b"")
    has_points = (kind, number, len(body)) == (Kind.REQUEST, 0, 3 * 33) and answer[:1] == b"\0"
    if asks_setup or has_points:
        assert len(answer) == 1 + 3 * 33
    else:
        assert answer[:1] == b"\1"
        assert len(answer) <= 1 + LONGEST_WORDS
        assert bank.receive(Question(Kind.SETUP).to_bytes())[:1] == b"\1"  # it is over
    assert not run.kept


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "private_set_intersection.python", None)
    with pytest.raises(AlignmentError, match=r'pip install "pbmvfl\[deploy\]"'):
        psi.library()


def test_a_secret_order_is_a_uniform_permutation():
    """Chi-square over the 24 orders of 4 things, 23 degrees of freedom: above 110 with probability below 1e-12."""
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(4800):
        order = tuple(psi.secret_order(4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert sorted(next(iter(counts))) == [0, 1, 2, 3]
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) + 200 * (24 - len(counts)) < 110


@given(st.lists(st.binary(min_size=3, max_size=3), min_size=1), st.lists(st.binary(min_size=3, max_size=3)))
def test_an_index_finds_what_a_dictionary_finds(held, asked):
    """Also strings that end in zero bytes, which arrays of text do not show."""
    first = {}
    for place, each in enumerate(held):
        first.setdefault(each, place)
    asked = [*asked, *held, b"\0\0\0", b"a\0\0"]
    found = psi.Index(b"".join(held), 3).places_of(b"".join(asked))
    assert found.tolist() == [first.get(each, -1) for each in asked]


def test_a_match_needs_the_whole_coordinate():
    """The index is of all 32 bytes: a point that differs from one of the setup in its last bit alone is another."""
    client, server = psi.PsiClient(workers=1), psi.PsiServer(workers=1)
    points = psi.points_of(client.request(lambda: PEOPLE).result(), len(PEOPLE))
    response = psi.points_of(server.response(points), len(PEOPLE))
    setup = server.setup(lambda: PEOPLE[::2]).result()
    near = b"".join(p[:-1] + bytes([p[-1] ^ 1]) for p in psi.points_of(setup, len(PEOPLE[::2])))
    assert client.matches(psi.whole_setup([setup]), response).result().tolist() == list(range(0, len(PEOPLE), 2))
    assert not len(client.matches(psi.whole_setup([near]), response).result())
    client.close()
    server.close()

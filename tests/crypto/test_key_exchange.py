"""Key agreement: both ends of a pair agree, nobody else can take part, and every session is new."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto import entropy as entropy
from pbmvfl.crypto.key_exchange import Identity, KeyExchange, Session, SignedKey, kind_key
from pbmvfl.errors import IdentityError, ProtocolError

NUM_PARTIES = 4
#: Points of small order on Curve25519: anything combined with them gives zero (RFC 7748, section 6.1).
LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    (2**255 - 19 - 1).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 19 + 1).to_bytes(32, "little"),
]


class Handshake:
    """All parties' sides of one session."""

    def __init__(self, *, nonce: bytes = b"n", run_id: bytes = b"run-0001", identities: list[Identity] | None = None):
        self.identities = identities or [Identity.generate() for _ in range(NUM_PARTIES)]
        self.pinned = [identity.public for identity in self.identities]
        nonces = [hashlib.sha256(nonce + bytes([index])).digest() for index in range(NUM_PARTIES)]
        self.session = Session.open(plan_hash=bytes(32), run_id=run_id, nonces=nonces)
        self.exchanges = [
            KeyExchange(session=self.session, index=index, identity=identity)
            for index, identity in enumerate(self.identities)
        ]
        self.keys = [exchange.signed_key for exchange in self.exchanges]

    def pair_keys(self, index: int, keys: list[SignedKey] | None = None, pinned: list[bytes] | None = None):
        return self.exchanges[index].pair_keys(keys or self.keys, pinned or self.pinned)

    def signed(self, index: int, public: bytes) -> SignedKey:
        """A key of the attacker's choice that this party's identity really signed."""
        chosen = KeyExchange(session=self.session, index=index, identity=self.identities[index])
        # What is signed: label, protocol version, index, session digest, key.
        statement = b"pbmvfl session key\0" + (2).to_bytes(2, "little") + index.to_bytes(2, "little")
        statement += self.session.digest + public
        Ed25519PublicKey.from_public_bytes(
            self.identities[index].public
        ).verify(  # the statement's form, against a key of the program
            chosen.signed_key.signature, statement[:-32] + chosen.signed_key.public
        )
        return SignedKey(public, self.identities[index].sign(statement))


@pytest.fixture
def handshake() -> Handshake:
    return Handshake()


def swapped(keys: list[SignedKey], index: int, key: SignedKey) -> list[SignedKey]:
    return [key if peer == index else old for peer, old in enumerate(keys)]


def test_both_sides_of_each_pair_derive_the_same_key_and_pairs_differ(handshake):
    derived = [handshake.pair_keys(index) for index in range(NUM_PARTIES)]
    pairs = {}
    for low, high in itertools.combinations(range(NUM_PARTIES), 2):
        assert derived[low][high] == derived[high][low]
        pairs[low, high] = derived[low][high]
    assert all(len(key) == 32 for key in pairs.values())
    assert len(set(pairs.values())) == len(pairs) == NUM_PARTIES * (NUM_PARTIES - 1) // 2
    assert all(sorted(keys) == [peer for peer in range(NUM_PARTIES) if peer != me] for me, keys in enumerate(derived))


def test_new_sessions_of_the_same_identities_give_new_keys():
    identities = [Identity.generate() for _ in range(NUM_PARTIES)]
    keys = [Handshake(nonce=nonce, identities=identities).pair_keys(0)[1] for nonce in (b"a", b"b", b"b")]
    assert len(set(keys)) == 3  # even with the same nonces, because the session keys are new


@pytest.mark.parametrize("change", ["plan_hash", "run_id", "nonces", "order of the nonces", "number of parties"])
def test_a_session_depends_on_everything_that_was_agreed(change):
    agreed = {"plan_hash": bytes(32), "run_id": bytes(8), "nonces": [b"1" * 32, b"2" * 32]}
    other = dict(agreed)
    if change == "plan_hash":
        other["plan_hash"] = b"x" + bytes(31)
    elif change == "run_id":
        other["run_id"] = b"x" + bytes(7)
    elif change == "nonces":
        other["nonces"] = [b"1" * 32, b"3" * 32]
    elif change == "order of the nonces":
        other["nonces"] = [b"2" * 32, b"1" * 32]
    else:
        other["nonces"] = [b"1" * 32, b"2" * 32, b"3" * 32]
    assert Session.open(**agreed) == Session.open(**agreed)
    assert Session.open(**agreed).id != Session.open(**other).id


def test_the_derived_key_is_bound_to_session_and_run_even_for_equal_secrets():
    # With the same X25519 secrets, only the session and the run can make the mask keys differ.
    def secret(count: int) -> bytes:
        return b"s" * count

    identities = [Identity.generate(), Identity.generate()]
    found = set()
    for run_id, nonce in itertools.product((b"run-0001", b"run-0002"), (b"1" * 32, b"2" * 32)):
        session = Session.open(plan_hash=bytes(32), run_id=run_id, nonces=[nonce, bytes(32)])
        sides = [KeyExchange(session=session, index=i, identity=identities[i], secret=secret) for i in (0, 1)]
        found.add(sides[0].pair_keys([side.signed_key for side in sides], [i.public for i in identities])[1])
    assert len(found) == 4


@pytest.mark.parametrize("victim", range(NUM_PARTIES))
@pytest.mark.parametrize("honest", range(NUM_PARTIES))
def test_a_swapped_session_key_is_refused(handshake, victim, honest):
    attacker = X25519PrivateKey.generate().public_key().public_bytes_raw()
    unsigned = replace(handshake.keys[victim], public=attacker)
    with pytest.raises(IdentityError, match=f"party={victim}"):
        handshake.pair_keys(honest, swapped(handshake.keys, victim, unsigned))


def test_a_key_signed_by_another_identity_is_refused(handshake):
    stranger = KeyExchange(session=handshake.session, index=1, identity=Identity.generate()).signed_key
    with pytest.raises(IdentityError, match="party=1"):
        handshake.pair_keys(0, swapped(handshake.keys, 1, stranger))


def test_a_wrongly_pinned_identity_is_refused(handshake):
    pinned = [*handshake.pinned[:2], Ed25519PrivateKey.generate().public_key().public_bytes_raw(), handshake.pinned[3]]
    with pytest.raises(IdentityError, match="party=2"):
        handshake.pair_keys(0, pinned=pinned)


def test_two_parties_keys_exchanged_for_each_other_are_refused(handshake):
    first, second, third, fourth = handshake.keys
    with pytest.raises(IdentityError, match="party=1"):
        handshake.pair_keys(0, [first, third, second, fourth])


def test_a_key_of_an_earlier_session_is_refused(handshake):
    earlier = Handshake(nonce=b"earlier", identities=handshake.identities)
    with pytest.raises(IdentityError, match="party=3"):
        handshake.pair_keys(0, swapped(handshake.keys, 3, earlier.keys[3]))


def test_a_key_of_another_run_is_refused(handshake):
    other = Handshake(run_id=b"run-0002", identities=handshake.identities)
    with pytest.raises(IdentityError, match="party=3"):
        handshake.pair_keys(0, swapped(handshake.keys, 3, other.keys[3]))


@pytest.mark.parametrize("point", LOW_ORDER, ids=range(len(LOW_ORDER)))
def test_a_point_of_low_order_is_refused_even_when_it_is_signed(handshake, point):
    with pytest.raises(IdentityError, match="low order"):
        handshake.pair_keys(0, swapped(handshake.keys, 1, handshake.signed(1, point)))


def test_a_signed_key_of_ordinary_order_is_accepted(handshake):
    # The control for the test above: it is the point that is refused, not the way it was signed.
    point = X25519PrivateKey.generate().public_key().public_bytes_raw()
    assert 1 in handshake.pair_keys(0, swapped(handshake.keys, 1, handshake.signed(1, point)))


def test_a_party_refuses_another_key_in_its_own_place_even_one_it_signed(handshake):
    other = handshake.signed(0, X25519PrivateKey.generate().public_key().public_bytes_raw())
    with pytest.raises(IdentityError, match="party=0"):
        handshake.pair_keys(0, swapped(handshake.keys, 0, other))


@settings(max_examples=60)
@given(position=st.integers(0, 95), bit=st.integers(0, 7), victim=st.integers(0, NUM_PARTIES - 1))
def test_any_changed_bit_of_a_signed_key_is_refused(position, bit, victim):
    handshake = Handshake()
    changed = bytearray(handshake.keys[victim].to_bytes())
    changed[position] ^= 1 << bit
    with pytest.raises(IdentityError):
        handshake.pair_keys(0, swapped(handshake.keys, victim, SignedKey.from_bytes(bytes(changed))))


@given(pair_key=st.binary(min_size=32, max_size=32), code=st.integers(1, 255))
def test_the_key_of_a_kind_of_round_is_one_block_of_hkdf_expand(pair_key, code):
    # RFC 5869, section 2.3: T(1) = HMAC(PRK, info | 0x01), and 32 bytes are one block of SHA-256.
    expected = hmac.digest(pair_key, b"pbmvfl kind\0" + bytes([code]) + b"\x01", "sha256")
    assert kind_key(pair_key, code) == expected


def test_no_two_kinds_of_rounds_share_a_key():
    assert len({kind_key(bytes(32), code) for code in range(1, 256)}) == 255


def test_an_identity_survives_being_written_down():
    identity = Identity.generate()
    again = Identity.from_private_bytes(identity.private_bytes())
    assert again.public == identity.public != Identity.generate().public


def test_a_forked_child_cannot_finish_its_parent_s_key_agreement(handshake, monkeypatch):
    before = handshake.pair_keys(0)
    monkeypatch.setattr(entropy, "_generation", entropy._generation + 1)  # what a fork does in the child
    with pytest.raises(ProtocolError, match=r"party=0: its session key belongs to the process that forked this one"):
        handshake.pair_keys(0)
    monkeypatch.undo()
    assert handshake.pair_keys(0) == before

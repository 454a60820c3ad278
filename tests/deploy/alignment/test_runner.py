"""An alignment between organisations' own folders: the tables that their policies name, and what is left in each."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pbmvfl.deploy.alignment import coordinator, messages, psi
from pbmvfl.deploy.alignment import party as alignment_party
from pbmvfl.deploy.alignment.aligned_rows import AlignedRows
from pbmvfl.deploy.alignment.runner import LabelRows, Request, align_labels, party_alignment
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.errors import AlignmentError
from support.alignment_runs import MemoryLink
from support.federation_texts import federation_text

pytest.importorskip("private_set_intersection.python")

LIMIT = '[[limit]]\nepsilon = 8\ndelta = 1e-6\nunit = "cell"\naccounting = "strict"\n'


def make_home(folder: Path, name: str, table: str) -> SiteFolder:
    folder.mkdir(parents=True)
    (folder / "federation.toml").write_text(federation_text())
    (folder / f"{name}.csv").write_text(table)
    more = 'label = "ill"\n' if name == "clinic" else 'dataset = "people"\n' + LIMIT
    (folder / "policy.toml").write_text(f'[data]\nfile = "{name}.csv"\nid = "person"\n' + more)
    (folder / "policy.toml").chmod(0o600)
    home = SiteFolder(folder)
    home.write_name(name)
    return home


def table_of(values: dict[str, float], column: str = "x") -> str:
    return f"person,{column}\n" + "".join(f"{person},{value!r}\n" for person, value in values.items())


class Federation:
    """Three homes, and an alignment between them."""

    def __init__(self, folder: Path, *, bank: str, shop: str, clinic: str | None = None) -> None:
        people = [f"person-{number}" for number in range(12)]
        clinic = clinic or table_of({each: number % 2 for number, each in enumerate(people)}, "ill")
        tables = {"clinic": clinic, "bank": bank, "shop": shop}
        self.homes = {name: make_home(folder / name, name, table) for name, table in tables.items()}
        self.link = MemoryLink({})

    def align(self, name: str = "first") -> LabelRows:
        server = self.homes["clinic"]
        Request.of(server).write(server.request(name))
        sides = {
            party: party_alignment(self.homes[party], name, PolicyFile.read(self.homes[party]))
            for party in ("bank", "shop")
        }
        self.link = MemoryLink(sides)
        try:
            return align_labels(server, name, self.link, lambda *_: None)
        finally:
            for side in sides.values():
                side.close()

    def rows(self, party: str, name: str = "first") -> AlignedRows:
        return AlignedRows.load(self.homes[party].alignment(name))


BANK = {f"person-{number}": number + 0.4242 for number in range(3, 15)}
SHOP = {f"person-{number}": -number - 0.1717 for number in (9, 1, 4, 7, 20)}


def test_every_organisation_has_its_own_rows_in_one_order(tmp_path):
    federation = Federation(tmp_path, bank=table_of(BANK), shop=table_of(SHOP))
    found = federation.align()
    assert sorted(found.ids) == ["person-4", "person-7", "person-9"]
    assert (found.kinds, found.widths) == (("c", "c"), (1, 1))
    bank, shop = federation.rows("bank"), federation.rows("shop")
    assert bank.ids == shop.ids == found.ids
    np.testing.assert_array_equal(bank.features[:, 0], np.float32([BANK[each] for each in found.ids]))
    np.testing.assert_array_equal(shop.features[:, 0], np.float32([SHOP[each] for each in found.ids]))
    assert [found.class_names[label] for label in found.train_labels] == [str(int(each[-1]) % 2) for each in found.ids]
    for party in (bank, shop):
        assert party.proof(b"c" * 32, "bank") == found.proof(b"c" * 32, "bank")


def known_randomness(monkeypatch):
    """Keys and orders that are the same in two runs, so that their messages can be compared byte by byte."""
    keys = iter(range(1, 100))
    monkeypatch.setattr(psi, "_new_key", lambda kind: (b"c" if kind.__name__ == "client" else b"s") * 32)

    class Known:
        @staticmethod
        def generate():
            return X25519PrivateKey.from_private_bytes(bytes([next(keys)] * 32))

    monkeypatch.setattr(messages, "X25519PrivateKey", Known)
    for module in (coordinator, alignment_party):
        monkeypatch.setattr(module, "secret_order", lambda count: np.arange(count)[::-1].astype(np.int64))
    monkeypatch.setattr(coordinator.os, "urandom", lambda count: b"u" * count)


def crossed(folder: Path, bank: dict[str, float]) -> list[tuple[str, bytes, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        known_randomness(patch)
        federation = Federation(folder, bank=table_of(bank), shop=table_of(SHOP))
        federation.align()
        return federation.link.crossed


def test_no_message_depends_on_a_feature_value(tmp_path):
    """With the same randomness, other values give the same bytes, and another id gives others."""
    first = crossed(tmp_path / "1", BANK)
    other_values = crossed(tmp_path / "2", {person: value * -3.7 + 1e6 for person, value in BANK.items()})
    other_id = crossed(tmp_path / "3", {("person-99" if person == "person-14" else person): 0.0 for person in BANK})
    assert first == other_values
    assert first != other_id


def test_no_feature_value_and_no_label_is_in_any_message(tmp_path):
    """Also with known randomness, so that four random bytes are never by chance those of a value."""
    said = b"|".join(question + b"|" + answer for _, question, answer in crossed(tmp_path, BANK))
    for value in [*BANK.values(), *SHOP.values()]:
        forms = [repr(value).encode()] + [struct.pack(form, value) for form in ("<f", ">f", "<d", ">d")]
        assert not [form for form in forms if form in said]
    assert b"ill" not in said
    assert b"first" in said  # the search finds what is there


def test_a_label_holder_s_own_fault_is_said_before_any_party_is_asked(tmp_path):
    federation = Federation(tmp_path, bank=table_of(BANK), shop=table_of(SHOP), clinic="person,ill\na,1\na,0\n")
    with pytest.raises(AlignmentError, match="1 of 2 rows have an id that an earlier row has"):
        federation.align()
    assert not federation.link.crossed


def test_a_party_s_policy_limits_how_many_ids_are_asked_about(tmp_path):
    federation = Federation(tmp_path, bank=table_of(BANK), shop=table_of(SHOP))
    path = federation.homes["bank"].policy
    path.write_text(path.read_text() + "[runs]\nlargest_alignment = 11\n")
    with pytest.raises(AlignmentError, match="has 12 ids; its owner's policy permits 11"):
        federation.align()

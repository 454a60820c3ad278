"""Certificates that cannot be used are named, and nobody is asked for a passphrase."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization

from pbmvfl.deploy.link.grpc_stream import party_credentials, server_credentials
from pbmvfl.errors import LinkError
from support.certificates import Authority

BOTH = pytest.mark.parametrize("context", [party_credentials, server_credentials], ids=["party", "server"])


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


@BOTH
@pytest.mark.parametrize("missing", ["certificate", "private_key", "authority"])
def test_a_missing_file_is_named(context, missing, authority, tmp_path):
    credentials = replace(authority.issue("bank"), **{missing: tmp_path / "gone.pem"})
    with pytest.raises(LinkError, match=r"certificates cannot be used: .*gone.pem"):
        context(credentials)


@BOTH
def test_a_key_of_another_certificate_is_refused(context, authority):
    credentials = replace(authority.issue("bank"), private_key=authority.issue("bank").private_key)
    with pytest.raises(LinkError, match="certificates cannot be used"):
        context(credentials)


@BOTH
def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(context, authority):
    credentials = authority.issue("bank")
    key = serialization.load_pem_private_key(credentials.private_key.read_bytes(), None)
    credentials.private_key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(LinkError, match="certificates cannot be used"):
        context(credentials)


@BOTH
def test_what_is_no_certificate_is_refused_without_its_content(context, authority):
    credentials = authority.issue("bank")
    credentials.private_key.write_text("a private value")
    assert stat.S_ISREG(credentials.private_key.stat().st_mode)
    with pytest.raises(LinkError) as refusal:
        context(credentials)
    assert "a private value" not in str(refusal.value)

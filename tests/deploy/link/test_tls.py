"""Certificates that cannot be used are named, and nobody is asked for a passphrase."""

from __future__ import annotations

import gc
import select
import socket
import ssl
import stat
import struct
import warnings
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization

from pbmvfl.deploy.link.tls import party_context, server_context, wrap
from pbmvfl.errors import LinkError
from support.certificates import Authority

BOTH = pytest.mark.parametrize("context", [party_context, server_context], ids=["party", "server"])


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


def _left_before_tls() -> socket.socket:
    """The accepted end of a connection whose other end has reset it already."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    poll = select.poll()
    poll.register(accepted, select.POLLIN)
    assert poll.poll(10_000), "the reset did not arrive"
    return accepted


def _left_open_by_wrapping(context: ssl.SSLContext) -> list[str]:
    """What the collector has to close after a wrap that fails."""
    accepted = _left_before_tls()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(OSError):
            wrap(context, accepted, server_side=True)
        gc.collect()
    return [str(each.message) for each in said if issubclass(each.category, ResourceWarning)]


def test_a_connection_that_was_left_before_tls_began_is_closed(authority):
    assert _left_open_by_wrapping(server_context(authority.issue("clinic"))) == []


def test_the_standard_librarys_own_socket_is_left_to_the_collector(authority):
    """The control. A Python that closes it has no need of `tls._Socket`."""
    context = server_context(authority.issue("clinic"))
    context.sslsocket_class = ssl.SSLSocket
    left = _left_open_by_wrapping(context)
    if not left:
        pytest.skip("this Python closes it by itself")
    assert any("unclosed" in words for words in left)

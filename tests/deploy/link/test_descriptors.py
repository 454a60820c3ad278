"""A connection is closed by the thread that uses it: OpenSSL never goes on with a number that stands for a file.

A descriptor is a number, and the next file that is opened gets the smallest free one. A thread inside OpenSSL keeps the
number of its connection. If another thread closed that connection, OpenSSL would read the start of a file as a record
of TLS, and write an alert into it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pbmvfl.deploy.link import tls
from pbmvfl.deploy.link.acceptor import Acceptor
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.tls import server_context
from pbmvfl.errors import LinkError
from support.certificates import Authority
from support.line_parties import SERVER, Federation, Site, echo

CONTENT = b'{\n "format": 2, and so on\n}\n' * 4


SOCKET = tls._Socket


class InsideOpenSSL:
    """The first thread that comes here stands still inside OpenSSL until `go_on`; later ones fail at once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._may_go_on = threading.Event()
        self._first = threading.Lock()
        self._read: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()

    def stop(self, connection: Any, step: Callable[[Any], object]) -> None:
        """Go on with `step` of OpenSSL's own object after files were opened up to the connection's number."""
        held, number = connection._sslobj, connection.fileno()
        is_first = self._first.acquire(blocking=False)
        self.arrived.put(number)
        if not is_first:
            raise ConnectionAbortedError
        assert self._may_go_on.wait(60)
        opened: list[int] = []
        while not opened or opened[-1] < number:
            opened.append(os.open(self._file, os.O_RDWR))
        with contextlib.suppress(OSError):
            step(held)
        self._read.put([os.read(each, 1000) for each in opened])
        for each in opened:
            os.close(each)

    def go_on(self) -> list[bytes]:
        """What is read from the files that were opened meanwhile."""
        self._may_go_on.set()
        return self._read.get(timeout=60)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "checkpoints.json"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def handshake(file, monkeypatch) -> InsideOpenSSL:
    """Whoever does a TLS handshake stands still in it."""
    inside = InsideOpenSSL(file)

    def do_handshake(self: Any, block: bool = False) -> None:
        del block
        inside.stop(self, lambda held: held.do_handshake())
        raise ConnectionAbortedError

    monkeypatch.setattr(SOCKET, "do_handshake", do_handshake)
    return inside


def assert_whole(file: Path, read: list[bytes]) -> None:
    assert read
    assert set(read) == {CONTENT}
    assert file.read_bytes() == CONTENT


# --- at the server: strangers who are sent away in the midst of their handshake ---


def door(folder: Path, **choices: Any) -> Acceptor:
    context = server_context(Authority(folder / "ca").issue(SERVER))
    usual = {"listen": ("127.0.0.1", 0), "tls": context, "on_connection": lambda *_: None, "time_limit": 60.0}
    return Acceptor(**{**usual, **choices})


@contextlib.contextmanager
def silent(address: tuple[str, int]) -> Iterator[None]:
    """A connection that says nothing."""
    with socket.create_connection(address, timeout=60):
        yield


@pytest.mark.parametrize("choices", [{"most": 1}, {"time_limit": 0.0}], ids=["one too many", "out of time"])
def test_a_stranger_who_is_sent_away_touches_no_file(choices, handshake, file, tmp_path):
    entrance = door(tmp_path, **choices)
    try:
        with silent(entrance.address):
            handshake.arrived.get(timeout=60)
            with silent(entrance.address):  # the first has to go before the second is heard
                handshake.arrived.get(timeout=60)
                assert_whole(file, handshake.go_on())
    finally:
        entrance.close()


def test_a_stranger_who_is_there_at_the_end_touches_no_file(handshake, file, tmp_path):
    entrance = door(tmp_path)
    with silent(entrance.address):
        handshake.arrived.get(timeout=60)
        entrance.close()
        assert_whole(file, handshake.go_on())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(entrance.address, timeout=60)


# --- at a party: its line is closed by another thread than the one that uses it ---


def serving(site: Site) -> tuple[Any, threading.Thread]:
    line = site.line()

    def serve() -> None:
        with contextlib.suppress(LinkError):
            line.serve(echo)

    thread = threading.Thread(target=serve, name="serves", daemon=True)
    thread.start()
    return line, thread


def test_a_line_that_is_closed_while_it_dials_touches_no_file(handshake, file, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        credentials = Authority(tmp_path / "ca").issue("bank")
        line, thread = serving(Site("bank", server.getsockname()[:2], credentials))
        handshake.arrived.get(timeout=60)
        line.close()
        assert_whole(file, handshake.go_on())
        thread.join(60)
        assert not thread.is_alive()


def test_a_line_that_is_closed_while_it_waits_touches_no_file(file, monkeypatch, tmp_path):
    inside, recv = InsideOpenSSL(file), SOCKET.recv

    def stopped(self: Any, size: int = 1024, flags: int = 0) -> bytes:
        if threading.current_thread().name == "serves":
            inside.stop(self, lambda held: held.read(size))
        return recv(self, size, flags)

    with Federation(tmp_path, ["bank"]) as federation:
        site = federation.site("bank")
        line, thread = serving(site)
        federation.line.join(timeout=60)
        assert federation.line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}
        monkeypatch.setattr(SOCKET, "recv", stopped, raising=False)
        federation.line.ask({0: b"y"}, channel=Channel.SETUP)  # it waits for the next question from here on
        inside.arrived.get(timeout=60)
        line.close()
        assert_whole(file, inside.go_on())
        thread.join(60)
        assert not thread.is_alive()

"""Frames on a stream: whole ones come out, however the bytes arrive, and what is announced costs nothing."""

from __future__ import annotations

import socket
import struct
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.deploy.link.connection import FrameBuffer, framed, receive, send
from pbmvfl.errors import LinkError


@given(st.lists(st.binary(max_size=50), max_size=10), st.data())
def test_frames_come_out_whole_however_the_bytes_arrive(bodies, data):
    stream = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    buffer, found = FrameBuffer(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer.feed(stream[start:end])
        while (frame := buffer.take()) is not None:
            found.append(frame)
    assert found == bodies
    assert len(buffer) == 0


@given(st.binary(max_size=100), st.integers(0, 100))
def test_a_frame_may_be_as_long_as_the_limit_and_no_longer(body, limit):
    buffer = FrameBuffer(limit=limit)
    buffer.feed(struct.pack(">I", len(body)) + body)
    if len(body) <= limit:
        assert framed(body, limit=limit) == struct.pack(">I", len(body)) + body
        assert buffer.take() == body
        return
    with pytest.raises(LinkError, match=f"permitted: at most {limit}"):
        framed(body, limit=limit)
    with pytest.raises(LinkError, match=f"announced; permitted: at most {limit}"):
        buffer.take()


def test_an_announced_length_costs_no_memory():
    tracemalloc.start()
    try:
        buffers = [FrameBuffer() for _ in range(100)]
        for buffer in buffers:
            buffer.feed(struct.pack(">I", 64 << 20) + b"x")
            assert buffer.take() is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_what_came_of_a_frame_outlives_a_timeout():
    here, there = socket.socketpair()
    with here, there:
        buffer = FrameBuffer()
        there.sendall(b"\0\0\0\5he")
        with pytest.raises(TimeoutError):
            receive(here, buffer, deadline=time.monotonic() + 0.05)
        there.sendall(b"llo")
        assert receive(here, buffer, deadline=time.monotonic() + 60) == b"hello"


def test_an_end_is_told_from_a_timeout():
    here, there = socket.socketpair()
    with here:
        there.sendall(b"\0\0\0\5he")
        there.close()
        with pytest.raises(EOFError):
            receive(here, FrameBuffer(), deadline=time.monotonic() + 60)


def test_sending_ends_when_nobody_reads():
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        send(here, bytes(8 << 20), deadline=time.monotonic() + 0.05)

"""Secret randomness: the right cipher stream, never the same twice, never copied, never shared with a child."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.crypto import entropy as door
from pbmvfl.crypto.entropy import SystemEntropy, fast_keystream, keystream
from support.known_randomness import SeededEntropy


def drawn(entropy: SystemEntropy | SeededEntropy, count: int) -> bytes:
    buffer = np.zeros(count, dtype=np.uint8)
    entropy.fill(buffer)
    return buffer.tobytes()


@given(key=st.binary(min_size=32, max_size=32), sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_the_fast_stream_is_plain_counter_mode_from_block_two(key, sizes, counter_mode):
    stream = fast_keystream(key)
    pieces = b"".join(stream.update(bytes(size)) for size in sizes)
    assert pieces == counter_mode(key, sum(sizes), first_block=2)


@given(key=st.binary(min_size=32, max_size=32), first=st.integers(0, 2**64), size=st.integers(1, 2000))
def test_a_stream_can_start_at_any_block(key, first, size, counter_mode):
    assert keystream(key, first_block=first).update(bytes(size)) == counter_mode(key, size, first_block=first)


def test_known_bytes_are_the_stream_of_the_padded_seed_and_are_marked(counter_mode):
    known = SeededEntropy(b"seed")
    assert drawn(known, 1000) + drawn(known, 70_000) == counter_mode(b"seed".ljust(32, b"\0"), 71_000, first_block=2)
    assert known.seeded
    assert not SystemEntropy().seeded


def test_fill_overwrites_the_whole_buffer_whatever_its_type():
    for kind in (np.uint8, np.uint16, np.uint64):
        buffer = np.zeros(4096, dtype=kind)
        SystemEntropy().fill(buffer)
        # A byte column of 4096 zeros has chance 256**-4096.
        assert buffer.view(np.uint8).reshape(4096, -1).any(axis=0).all()


def test_two_sources_never_give_the_same_bytes():
    # 32 bytes equal by chance: 2**-256.
    sources = [SystemEntropy() for _ in range(50)]
    first = [drawn(source, 32) for source in sources]
    again = [drawn(source, 32) for source in sources]
    assert len({*first, *again}) == 100


def test_no_argument_seeds_a_source():
    with pytest.raises(TypeError):
        SystemEntropy(b"seed")  # type: ignore[call-arg]


def test_the_key_comes_from_the_operating_system(monkeypatch, counter_mode):
    monkeypatch.setattr(door.os, "urandom", lambda count: b"k" * count)
    assert drawn(SystemEntropy(), 100) == counter_mode(b"k" * 32, 100, first_block=2)


def test_a_key_is_replaced_before_its_stream_is_exhausted(monkeypatch, counter_mode):
    keys = iter([b"1" * 32, b"2" * 32])
    monkeypatch.setattr(door.os, "urandom", lambda _: next(keys))
    monkeypatch.setattr(door, "BYTES_PER_KEY", 100)
    source = SystemEntropy()
    assert drawn(source, 60) == counter_mode(b"1" * 32, 60, first_block=2)
    assert drawn(source, 60) == counter_mode(b"2" * 32, 60, first_block=2)


def test_the_limit_of_a_key_is_below_what_its_block_counter_allows():
    # GCM counts blocks in 32 bits and starts at 2: after 2**32 - 2 blocks the stream would begin again.
    assert door.BYTES_PER_KEY <= 16 * (2**32 - 2)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_can_be_neither_copied_nor_saved(copied):
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(SystemEntropy())


def drawn_by_a_child(source: SystemEntropy, count: int) -> bytes:
    """What a forked child draws from a source that it inherited."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but the draw, and no way back into the test runner
        try:
            os.write(writer, drawn(source, count))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0) == (child, 0)
    assert len(found) == count
    return found


# Python 3.12 warns about a fork beside threads; libraries keep idle ones, and the child calls none of their code.
no_fork_warning = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@no_fork_warning
def test_a_forked_child_draws_other_bytes_than_its_parent():
    source = SystemEntropy()
    drawn(source, 16)
    first, second = (drawn_by_a_child(source, 64) for _ in range(2))
    assert len({first, second, drawn(source, 64)}) == 3


@no_fork_warning
def test_without_a_new_key_a_child_would_repeat_its_parent(monkeypatch):
    # The control for the test above.
    source = SystemEntropy()
    monkeypatch.setattr(source, "_rekey", lambda: None)
    assert drawn_by_a_child(source, 64) == drawn(source, 64)

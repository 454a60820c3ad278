"""A party's stored answers: a row that comes again gets the same symbols again, and costs nothing.

They are for mechanisms whose releases stand alone (randomised response): what was sent for a row, under the same
weights, by the same vote and the same law, is sent again instead of being drawn anew. Sums behind masks have nothing to
store. Only what has been released, or is about to be, is ever kept: never a true symbol, a score or a column, nor
anything that depends on one.

    known = answers.known(keys)                 # which rows are charged: those that are not known
    fresh = mechanism.randomize(...)            # drawn for ALL rows, so that time and length do not depend on the store
    sent  = answers.settle(keys, fresh)         # stored ones where there are, else the fresh ones, written down first

Which rows are known follows from which rows were predicted before, and how: a row whose columns changed is the same
row. A key is a digest under a secret of the store, so a file without its secret says nothing about names.

The file is a list of blocks, one for each call of `settle` with something new:

    magic, secret                                          once
    rows, width, check of the head | keys, answers | check of the block     (checks are digests under the secret)

A block that a killed process left unfinished was never sent, and is cut off; anything else that is not as it was
written is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import lock_descriptor

from pbmvfl._descriptors import open_file, set_mode
from pbmvfl._files import PRIVATE_FILE, make_private_folder, sync_folder
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import AnswersError
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.schedule import Round
from pbmvfl.protocol.party_network import PartyNetwork
from pbmvfl.protocol.party_rows import PartyRows
from pbmvfl.training.encoders import weights_digest

_MAGIC = b"pbmvfl answers 1"
_SECRET_BYTES = 32
_KEY_BYTES, _CHECK_BYTES = 16, 16
_HEAD = struct.Struct("<II")
_FILE = "answers"


class StoredAnswers:
    """Answers of one party, in a folder of its own or, without one, for as long as the program runs."""

    def __init__(self, folder: Path | None = None) -> None:
        self._known: dict[bytes, npt.NDArray[np.uint32]] = {}
        self._blocks = 0
        self._descriptor: int | None = None
        if folder is None:
            self._secret = _new_secret()
            return
        self._path = folder / _FILE
        try:
            make_private_folder(folder)
            self._descriptor = open_file(self._path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        except OSError as error:
            raise AnswersError(f"answers={self._path} cannot be opened: {error}; name another folder") from error
        try:
            self._secret = self._open(self._descriptor)
        except BaseException:
            self.close()
            raise

    # --- keys ---

    def keys(self, release: Mapping[str, Any], rows: Iterable[str]) -> list[bytes]:
        """Return the key of each row.

        Args:
            release: Whose rows they are, and the law, vote and weights by which they are released, as plain values.
            rows: The names of the rows, which say who they are.

        Returns:
            A digest under the store's secret for each pair of `release` and a row's name.
        """
        what = json.dumps(dict(release), sort_keys=True, separators=(",", ":")).encode()
        shared = len(what).to_bytes(8, "little") + what
        start = hashlib.blake2b(shared, digest_size=_KEY_BYTES, key=self._secret, person=b"answers' keys")
        found = []
        for row in rows:
            digest = start.copy()
            digest.update(row.encode(errors="surrogatepass"))  # whatever letters a ledger takes
            found.append(digest.digest())
        return found

    # --- answers ---

    def known(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which of these rows have an answer, so that they cost nothing."""
        return np.array([key in self._known for key in keys], dtype=np.bool_)

    def put(self, keys: Sequence[bytes], answers: npt.NDArray[Any]) -> None:
        """Store answers that are about to be sent, (B, width), and have them on disk before this returns.

        Raises:
            AnswersError: A known row is given another answer (an answer stands for ever), or a value is no integer.
        """
        if answers.ndim != 2 or len(answers) != len(keys):
            raise AnswersError(f"answers of shape {answers.shape} for {len(keys)} rows; give (rows, coordinates)")
        values = answers.astype(np.uint32)
        if not np.array_equal(values, answers):
            raise AnswersError(f"answers of type {answers.dtype} are not integers of 0 to 2^32 - 1")
        new: dict[bytes, npt.NDArray[np.uint32]] = {}
        for key, value in zip(keys, values, strict=True):
            earlier = self._known.get(key, new.get(key))
            if earlier is None:
                new[key] = value
            elif not np.array_equal(earlier, value):
                raise AnswersError("a row that has an answer was given another one; send the stored one again")
        if not new:
            return
        if self._descriptor is not None:
            self._append(list(new), np.stack(list(new.values())))
        self._blocks += 1
        self._known.update(new)

    def settle(self, keys: Sequence[bytes], fresh: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what to send, (B, width).

        Stored answers where there are some, else fresh ones, which are stored first.

        A row that stands twice in the list gets its first answer twice.
        """
        sent = fresh.copy()
        first: dict[bytes, int] = {}
        for i, key in enumerate(keys):
            stored = self._known.get(key)
            if stored is None:
                sent[i] = fresh[first.setdefault(key, i)]
            elif stored.shape == fresh[i].shape:
                sent[i] = stored
            else:
                raise AnswersError(f"a stored answer has {stored.size} coordinates and the release {fresh[i].size}")
        self.put(list(first), sent[list(first.values())])
        return sent

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Let another process open it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # --- the file ---

    def _open(self, descriptor: int) -> bytes:
        try:
            locked = lock_descriptor(descriptor, blocking=False)
        except OSError:  # Without locks another process may have it.
            locked = False
        if not locked:
            raise AnswersError(f"answers={self._path} are in use by another process; wait until it has ended")
        data = _read(descriptor)
        start = len(_MAGIC) + _SECRET_BYTES + _CHECK_BYTES
        if len(data) < start and (_MAGIC.startswith(data) or data.startswith(_MAGIC)):
            return self._begin(descriptor)  # new, or its first write was cut short: nothing was ever sent from it
        secret = data[len(_MAGIC) : len(_MAGIC) + _SECRET_BYTES]
        if not data.startswith(_MAGIC) or not _same(data[start - _CHECK_BYTES : start], _check(secret, _MAGIC)):
            raise self._damaged()
        self._secret = secret
        position = start
        while position < len(data):
            following = self._block(data, position)
            if following is None:
                break
            position = following
        if position < len(data):
            os.ftruncate(descriptor, position)
            os.fsync(descriptor)
        return secret

    def _begin(self, descriptor: int) -> bytes:
        secret = _new_secret()
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write(descriptor, _MAGIC + secret + _check(secret, _MAGIC))
        set_mode(descriptor, PRIVATE_FILE)
        os.fsync(descriptor)
        sync_folder(self._path.parent)
        return secret

    def _head(self, rows: int, width: int) -> bytes:
        head = _HEAD.pack(rows, width)
        return head + _check(self._secret, head, self._blocks)

    def _block(self, data: bytes, position: int) -> int | None:
        """Read one block; return where the next one begins, or None if this one was never finished."""
        body = position + _HEAD.size + _CHECK_BYTES
        if body > len(data):
            return None
        rows, width = (int(each) for each in _HEAD.unpack_from(data, position))
        if not _same(data[position:body], self._head(rows, width)):
            raise self._damaged()
        end = body + rows * (_KEY_BYTES + 4 * width)
        if end + _CHECK_BYTES > len(data):
            return None
        if not _same(data[end : end + _CHECK_BYTES], _check(self._secret, data[position:end], self._blocks)):
            raise self._damaged()
        values = np.frombuffer(data[body + rows * _KEY_BYTES : end], dtype="<u4").reshape(rows, width)
        for i in range(rows):
            self._known[data[body + i * _KEY_BYTES : body + (i + 1) * _KEY_BYTES]] = values[i].astype(np.uint32)
        self._blocks += 1
        return end + _CHECK_BYTES

    def _append(self, keys: list[bytes], values: npt.NDArray[np.uint32]) -> None:
        assert self._descriptor is not None
        block = self._head(*values.shape) + b"".join(keys) + values.astype("<u4").tobytes()
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            _write(self._descriptor, block + _check(self._secret, block, self._blocks))
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise AnswersError(f"answers={self._path} cannot be written: {error}; nothing was sent") from error

    def _damaged(self) -> AnswersError:
        return AnswersError(
            f"answers={self._path} are damaged: they are not what was written there; restore a copy, or move the file "
            "away: rows are then answered, and charged, anew"
        )


def share_answers(source: Path, target: Path) -> None:
    """Give a second folder the answers of a first one, if it has any: one file with two names, so that they stay one.

    Where a file cannot have two names it is copied, and a row that is new to both is charged by each of them.
    """
    if not (source / _FILE).is_file():
        return
    make_private_folder(target)
    try:
        os.link(source / _FILE, target / _FILE)
    except OSError:
        shutil.copyfile(source / _FILE, target / _FILE)
        os.chmod(target / _FILE, PRIVATE_FILE)


def _new_secret() -> bytes:
    secret = np.empty(_SECRET_BYTES, dtype=np.uint8)
    SystemEntropy().fill(secret)
    return secret.tobytes()


def _check(secret: bytes, data: bytes, number: int = 0) -> bytes:
    """Return the digest of a part of the file. A block that was moved within the file has another one."""
    digest = hashlib.blake2b(
        number.to_bytes(8, "little"), digest_size=_CHECK_BYTES, key=secret, person=b"answers' file"
    )
    digest.update(data)
    return digest.digest()


def _same(first: bytes, second: bytes) -> bool:
    return hmac.compare_digest(first, second)


def _read(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    parts = []
    while part := os.read(descriptor, 1 << 24):
        parts.append(part)
    return b"".join(parts)


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


# ---
# Keys of the stored answers to a round: a row that comes again gets the same answer, and costs nothing.
#
# A row is known as the ledger knows it, by the owner's name of the data and by its id, and never by its columns: an
# answer that changed with a cell, or a row that is charged anew because of one, would tell of that cell, and no epsilon
# counts it. Changed columns get new answers when the owner names another data version, and then all rows do.
#
# Shape suffixes: B rows of the batch, P embedding_dim.


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswersOf:
    """Store of answers with the owner's names of the rows of a session."""

    store: StoredAnswers
    #: The owner's name of the people, under which the ledger counts.
    dataset: str = ""
    #: The owner's public name of the state that the columns are in.
    data_version: str = ""
    #: None: rows are numbered as the ledger numbers them, test rows after training rows.
    train_ids: Sequence[str] | None = None
    test_ids: Sequence[str] | None = None


class PartyAnswers:
    """Stored answers to the rounds of one party's plan, for those kinds of rounds that store any."""

    def __init__(self, plan: Plan, rows: PartyRows, network: PartyNetwork, of: AnswersOf) -> None:
        self._plan, self._rows, self._network, self._of = plan, rows, network, of

    def keys(self, current: Round) -> list[bytes]:
        """Return the keys under which the answers to a round's rows are stored."""
        made_by = hashlib.sha256(weights_digest(self._network.encoder).encode() + self._rows.digest)
        release: dict[str, Any] = {
            "dataset": self._of.dataset,
            "data_version": self._of.data_version,
            "event": self._plan.mechanism_for(current.kind).event.to_dict(),
            "vote": self._plan.vote.to_dict(),
            "weights": made_by.hexdigest(),
        }
        return self._of.store.keys(release, self._names(current))

    def new_rows(self, current: Round, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Return the rows of a round that have no stored answer."""
        return current.rows[~self._of.store.known(keys)]

    def settle(self, keys: Sequence[bytes], released_BP: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what leaves: stored answers where there are some, else the new ones, which are stored first."""
        return self._of.store.settle(keys, released_BP)

    def unanswered(self, first_round: int) -> npt.NDArray[np.int64] | None:
        """Return the test rows, in the order of their rounds, that have no stored answer under the present weights.

        None where the rounds from `first_round` on are charged as wholes: where they change what answers are made by,
        predict rows twice, or embed rows of a batch together, so that a new row's answer is about the others, too.
        """
        schedule, last = self._plan.schedule, self._plan.schedule.phases[-1]
        predicted_at = len(schedule) - schedule.rounds_per_pass(last.kind)
        if (
            self._plan.couples_rows
            or last.passes != 1
            or last.kind.split is not Split.TEST
            or not self._plan.stores_answers(last.kind)
            or first_round < predicted_at
        ):
            return None
        rounds = (schedule[number] for number in range(first_round, len(schedule)))
        found = [self.new_rows(current, self.keys(current)) for current in rounds]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def close(self) -> None:
        self._of.store.close()

    def _names(self, current: Round) -> list[str]:
        ids, before = self._of.train_ids, 0
        if current.kind.split is Split.TEST:
            ids, before = self._of.test_ids, self._plan.num_samples
        rows: list[int] = current.rows.tolist()
        return [str(before + row if ids is None else ids[row]) for row in rows]

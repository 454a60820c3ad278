"""Each role's own checkpoints: nobody else's weights, the newest common round, damage and strangers by name."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pbmvfl._files import write_atomically
from pbmvfl.crypto.key_exchange import Session
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import CheckpointError, IdentityError, OutOfOrder, PbmvflError, RunFolderError
from pbmvfl.federation import party_processes
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.epoch_history import HistoryLog
from pbmvfl.federation.federation import Federation, Parties, newest_common_round
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.party_processes import Processes
from pbmvfl.federation.results import Result
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.server import Server
from pbmvfl.wire.messages import Message, MessageKind
from pbmvfl.wire.refusals import Refusal, RefusalCode
from support.federation_runs import (
    EMBEDDING,
    Killed,
    Wire,
    change_index,
    counted_uses,
    files_of,
    killer,
    newest_states,
    shown_uses,
    spans_of,
    weights,
)

PER_EPOCH = 4  # 37 rows in batches of 10
ROLES = ("server", "party-0", "party-1", "party-2")
PREVIOUS = "checkpoints.previous.json"
OLD_RESULT = Path(__file__).parents[1] / "data" / "result-version-1.json"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_weights(first: Path, second: Path) -> None:
    one, two = weights(first), weights(second)
    assert set(one) == set(two) == set(ROLES)
    for role, state in one.items():
        assert state.keys() == two[role].keys()
        for name, value in state.items():
            assert torch.equal(value, two[role][name]), (role, name)


# --- nothing outside a party holds its weights ---


def pieces(state: dict[str, torch.Tensor]) -> Iterator[bytes]:
    """Every row of every tensor, as single and as double precision writes it: too long to occur by chance."""
    for name, value in state.items():
        if name == "run.public_start":  # no weight, but whether the first ones were public
            continue
        for row in np.atleast_2d(value.numpy()):
            assert len(row) >= 3
            assert len(set(row.tolist())) > 1
            yield from (row.astype(kind).tobytes() for kind in (np.float32, np.float64))


def listen(monkeypatch: pytest.MonkeyPatch, kind: type[InProcess] | type[Processes]) -> list[bytes]:
    """All that comes out of a transport of this kind from now on, and all that crosses the pipes to processes."""
    heard: list[bytes] = []

    class Listening(kind):  # type: ignore[misc,valid-type]  # which of the two is known only here
        def exchange(self, message: bytes, **options: Any) -> Any:
            answers = super().exchange(message, **options)
            heard.extend((message, *answers.received.values()))
            return answers

        def exact_embeddings(self, split: Any) -> Any:
            found = super().exact_embeddings(split)
            heard.extend(part.tobytes() for part in found)
            return found

    child_kind = party_processes._Child
    answer = child_kind.answer

    def piped(child: Any, deadline: float | None) -> bytes | None:
        found = answer(child, deadline)
        heard.append(found or b"")
        return found

    monkeypatch.setattr(child_kind, "answer", piped)
    monkeypatch.setattr(f"pbmvfl.federation.federation.{kind.__name__}", Listening)
    return heard


@pytest.mark.parametrize("mechanism", ["none", "pbm"])
@pytest.mark.parametrize("kind", [InProcess, pytest.param(Processes, marks=pytest.mark.slow)])
def test_nothing_outside_a_party_holds_its_weights(kind, mechanism, data, make_plan, monkeypatch, tmp_path):
    plan = make_plan(data, mechanism=mechanism)
    heard = listen(monkeypatch, kind)
    federation = Federation(plan, parties=Parties.PROCESSES if kind is Processes else Parties.IN_PROCESS)
    wire = Wire(federation)
    seen: dict[str, list[bytes]] = {role: [] for role in ROLES}

    def note(_: object) -> None:
        for role, state in weights(tmp_path).items():
            seen[role].extend(pieces(state))

    federation.fit(data, checkpoints=tmp_path, on_epoch=note)
    # Each party: five messages of the handshake, a question and an answer a round, an update an epoch.
    assert len(wire.messages) == 3 * (5 + 2 * 2 * PER_EPOCH + 2)
    assert {message for *_, message in wire.messages} <= {*heard}
    said = b"|".join((*heard, *(message for *_, message in wire.messages)))
    files = {role: b"|".join(tree(tmp_path / role).values()) for role in ROLES}
    files["beside them"] = b"|".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    newest = {role: list(pieces(load_file(path)))[::2] for role, path in newest_states(tmp_path).items()}
    for role in ROLES:
        assert len(seen[role]) >= 2 * 2 * 4
        for piece in seen[role]:
            assert piece not in said
            assert [where for where in files if where != role and piece in files[where]] == []
        assert all(piece in files[role] for piece in newest[role])  # the search would find it


@pytest.mark.parametrize("kind", [InProcess, Processes])
def test_a_transport_has_no_door_for_weights(kind):
    """Messages and the simulator's evaluation; nothing asks a party for its state."""
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert public == {"exchange", "close", "exact_embeddings", "owner_error", "public_starts"}
    assert not {"state", "load_state"} & set(dir(Party))
    commands = {"MESSAGE", "EMBEDDINGS", "LAST_ERROR", "PUBLIC_START", "STOP"}
    assert {command.name for command in party_processes._Command} == commands


@pytest.mark.parametrize("where", [Parties.IN_PROCESS, pytest.param(Parties.PROCESSES, marks=pytest.mark.slow)])
def test_every_folder_has_only_the_states_of_its_own_role(where, data, make_plan, tmp_path):
    plan = make_plan(data, optimizer="adam")
    Federation(plan, parties=where).fit(data, checkpoints=tmp_path)
    head = {"model.weight": (plan.num_classes, plan.embedding_dim), "model.bias": (plan.num_classes,)}
    network = {"model.network.0.weight": (plan.embedding_dim, 4), "model.network.0.bias": (plan.embedding_dim,)}
    network |= {"run.public_start": (1,)}
    assert {path.name for path in tmp_path.iterdir()} == {*ROLES, "sessions.json"}
    for role in ROLES:
        assert {path.name for path in (tmp_path / role).iterdir()} == files_of(tmp_path / role)
        states = {path.name for path in (tmp_path / role).glob("round-*")}
        assert len(states) == 2
        for name in states:
            state = load_file(tmp_path / role / name)
            shapes = {name: tuple(value.shape) for name, value in state.items() if not name.startswith("moment.")}
            assert shapes == (head if role == "server" else network)
        notes = [state["notes"] for state in json.loads((tmp_path / role / "checkpoints.json").read_text())["states"]]
        assert all(bool(each) == (role == "server") for each in notes)  # loss and traffic are the server's to know


# --- the newest round that all roles have ---


@pytest.fixture(scope="module")
def exact(make_data, make_plan, tmp_path_factory) -> tuple[VerticalDataset, Plan, Path]:
    """A run without noise: its folder as it was after each of its four epochs."""
    data = make_data()
    plan = make_plan(data, mechanism="none", momentum=0.9, num_epochs=4)
    folder = tmp_path_factory.mktemp("exact")

    def keep(line: Any) -> None:
        shutil.copytree(folder / "run", folder / f"epoch-{line.epoch}")

    Federation(plan).fit(data, checkpoints=folder / "run", on_epoch=keep)
    return data, plan, folder


#: Which epoch's state is each role's newest: every combination.
NEWEST = list(itertools.product([2, 3], repeat=len(ROLES)))


@pytest.mark.parametrize("newest", NEWEST, ids=str)
def test_a_run_goes_on_from_the_newest_round_that_all_roles_have(newest, exact, tmp_path):
    """Killed when some roles had written the state of the third epoch and others only that of the second."""
    data, plan, folder = exact
    for role, epoch in zip(ROLES, newest, strict=True):
        shutil.copytree(folder / f"epoch-{epoch}" / role, tmp_path / role)
        states = json.loads((tmp_path / role / "checkpoints.json").read_text())["states"]
        assert [state["completed_rounds"] // PER_EPOCH for state in states] == [epoch - 1, epoch]
    shutil.copy(folder / "epoch-3" / "sessions.json", tmp_path)
    common = PER_EPOCH * min(newest)
    assert newest_common_round(plan, tmp_path) == common
    federation = Federation(plan)
    wire = Wire(federation)
    result = federation.fit(data, checkpoints=tmp_path)
    assert spans_of(result)[1] == (common, 16)
    assert {number for number, *_ in wire.embeddings(1)} == set(range(common, 16))
    assert_same_weights(tmp_path, folder / "run")
    assert [line.epoch for line in result.history] == [1, 2, 3, 4]
    assert shown_uses(result.row_uses) == counted_uses(plan, spans_of(result))


@pytest.mark.parametrize("gone", ROLES)
def test_a_run_of_which_one_role_has_lost_everything_begins_anew_and_counts_both(gone, exact, tmp_path):
    data, plan, folder = exact
    shutil.copytree(folder / "epoch-3", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / gone)
    result = Federation(plan).fit(data, checkpoints=tmp_path / "run")
    assert spans_of(result) == [(0, 16), (0, 16)]
    assert shown_uses(result.row_uses) == {"joint": (8, 8, 8 * 37)}
    assert_same_weights(tmp_path / "run", folder / "run")


class PowerCut(BaseException):
    """Nothing catches it, and nothing is written after it."""


def power_cut_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[Path]:
    """The end of everything instead of the n-th write of a checkpoint's file."""
    written: list[Path] = []

    def write(path: Path, content: str | bytes, *, mode: int) -> None:
        if len(written) + 1 >= number:
            raise PowerCut
        written.append(path)
        write_atomically(path, content, mode=mode)

    monkeypatch.setattr("pbmvfl.federation.checkpoints.write_atomically", write)
    return written


#: Of each epoch's state, every role writes the weights and then its index.
WRITES_PER_EPOCH = 2 * len(ROLES)


@pytest.mark.parametrize("write", range(1, 3 * WRITES_PER_EPOCH + 1))
def test_a_run_cut_off_at_any_write_of_a_checkpoint_ends_with_the_same_weights(write, exact, monkeypatch, tmp_path):
    data, plan, folder = exact
    with monkeypatch.context() as patch:
        written = power_cut_at(patch, write)
        with pytest.raises(PowerCut):
            Federation(plan).fit(data, checkpoints=tmp_path)
    assert len(written) == write - 1
    complete = (write - 1) // WRITES_PER_EPOCH  # epochs that every role has
    result = Federation(plan).fit(data, checkpoints=tmp_path)
    assert spans_of(result)[1] == (PER_EPOCH * complete, 16)
    assert_same_weights(tmp_path, folder / "run")
    for role in ROLES:
        assert {path.name for path in (tmp_path / role).iterdir()} == files_of(tmp_path / role)


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_second_state_of_one_round_leaves_the_first_or_is_whole(crash_at, data, make_plan, monkeypatch, tmp_path):
    plan, run = make_plan(data), bytes(8)

    def save(value: float) -> None:
        kept = Checkpoints(folder=tmp_path, plan=plan, notes={"value": value})
        kept.save(run, 5, {"weight": torch.full((2,), value)})

    def found() -> tuple[float, float]:
        kept = Checkpoints(folder=tmp_path, plan=plan)
        return float(kept.load(run, 5)["weight"][0]), kept.notes_of(run, 5)["value"]

    save(1.0)
    with monkeypatch.context() as patch:
        power_cut_at(patch, crash_at)
        if crash_at == 3:  # the weights and the index are all that is written
            save(2.0)
        else:
            with pytest.raises(PowerCut):
                save(2.0)
    assert found() == ((2.0, 2.0) if crash_at == 3 else (1.0, 1.0))
    save(3.0)
    assert found() == (3.0, 3.0)
    assert len(list(tmp_path.glob("round-*"))) == 1


# --- damage ---


@pytest.fixture
def interrupted(data, make_plan, tmp_path) -> tuple[Plan, Path]:
    """Of four epochs two are complete; all roles have the states of rounds 4 and 8."""
    plan = make_plan(data, num_epochs=4)

    def kill(line: Any) -> None:
        if line.epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path / "run", on_epoch=kill)
    return plan, tmp_path / "run"


def refused(plan: Plan, data: VerticalDataset, folder: Path, kind: type[PbmvflError] = CheckpointError) -> str:
    """What a run from this folder says, which trains nothing and leaves everything as it is."""
    before = tree(folder)
    federation = Federation(plan)
    wire = Wire(federation)
    with pytest.raises(kind) as error:
        federation.fit(data, checkpoints=folder)
    assert not [message for *_, message in wire.messages if message[5] == EMBEDDING]
    assert tree(folder) == before
    return str(error.value)


def flip(path: Path, bit: int) -> None:
    """In place: to empty a file and write it anew makes many file systems wait for the disk."""
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


def test_every_single_flipped_bit_of_a_file_of_weights_is_refused_by_name(interrupted):
    plan, folder = interrupted
    kept = Checkpoints(folder=folder / "party-1", plan=plan)
    run_id = kept.run_id
    path = newest_states(folder)["party-1"]
    assert run_id is not None
    bits = 8 * path.stat().st_size
    assert bits > 1000
    for bit in range(bits):
        flip(path, bit)
        with pytest.raises(CheckpointError, match=path.name):
            kept.load(run_id, 2 * PER_EPOCH)
        flip(path, bit)
    kept.load(run_id, 2 * PER_EPOCH)


@pytest.mark.slow
def test_every_single_flipped_bit_of_an_index_is_refused_by_name_or_means_the_same(interrupted):
    """1e-05 may be written 1E-05. To resume from there is the index before it, unless the bit makes another format."""
    plan, folder = interrupted
    path = folder / "party-1" / "checkpoints.json"
    kept = Checkpoints(folder=path.parent, plan=plan, strict=True)
    resumed = Checkpoints(folder=path.parent, plan=plan)
    run_id = kept.run_id
    assert run_id is not None
    whole = path.read_bytes()
    means = json.loads(whole)
    accepted = other_formats = 0
    for bit in range(8 * len(whole)):
        flip(path, bit)
        try:
            same = json.loads(path.read_text()) == means
        except ValueError:
            same = False
        if same:
            accepted += 1
        else:
            with pytest.raises(CheckpointError, match=re.escape(str(path))):
                _ = kept.run_id
            if b'"format": 3,' in path.read_bytes()[:20]:
                assert resumed.rounds(run_id) == [PER_EPOCH]
            else:
                other_formats += 1
        flip(path, bit)
    assert path.read_bytes() == whole
    assert accepted < 10
    assert other_formats <= 8 * len('{\n "format": 3,')
    assert kept.rounds(run_id) == resumed.rounds(run_id) == [PER_EPOCH, 2 * PER_EPOCH]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 1.0])
def test_a_run_with_a_damaged_file_of_weights_is_refused_by_name_and_trains_nothing(where, role, interrupted, data):
    plan, folder = interrupted
    path = newest_states(folder)[role]
    flip(path, int(where * (8 * path.stat().st_size - 1)))
    assert str(path) in refused(plan, data, folder)


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    lambda index: index["states"][1].update(completed_rounds=4),
    lambda index: index["states"].reverse(),
    lambda index: index["states"].pop(),
    lambda index: index["states"][1].update(sha256=index["states"][0]["sha256"]),
    lambda index: index["states"][1].update(file=index["states"][0]["file"]),
    lambda index: index["states"][1]["notes"].update(seconds=0),
    lambda index: index.update(run_id="00" * 8),
    lambda index: index.update(format=1),
    lambda index: index.update(plan_hash="00" * 32),
    lambda index: index["plan"].update(seed=8),
]


@pytest.mark.parametrize("role", ["server", "party-2"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("previous", ["gone", "damaged"])
def test_a_run_with_a_changed_index_and_none_before_it_is_refused_by_name(change, role, previous, interrupted, data):
    plan, folder = interrupted
    path = folder / role / "checkpoints.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    if previous == "gone":
        (folder / role / PREVIOUS).unlink()
    else:
        flip(folder / role / PREVIOUS, 8 * 40)
    assert str(path) in refused(plan, data, folder)


# --- the index before ---


@pytest.mark.parametrize("damage", [b"", b"{", bytes(500), b"[]"], ids=["empty", "cut", "zeros", "a list"])
@pytest.mark.parametrize("role", ROLES)
def test_a_run_with_a_damaged_index_resumes_from_the_checkpoint_before(role, damage, exact, tmp_path, caplog):
    data, plan, folder = exact
    shutil.copytree(folder / "epoch-3", tmp_path / "run")
    (tmp_path / "run" / role / "checkpoints.json").write_bytes(damage)
    assert newest_common_round(plan, tmp_path / "run") == 2 * PER_EPOCH
    assert f"using {PREVIOUS}" in caplog.text
    result = Federation(plan).fit(data, checkpoints=tmp_path / "run")
    assert spans_of(result)[1] == (2 * PER_EPOCH, 4 * PER_EPOCH)
    assert shown_uses(result.row_uses) == counted_uses(plan, spans_of(result))
    assert [line.epoch for line in result.history] == [1, 2, 3, 4]
    assert_same_weights(tmp_path / "run", folder / "run")
    for each in ROLES:
        assert {path.name for path in (tmp_path / "run" / each).iterdir()} == files_of(tmp_path / "run" / each)


@pytest.mark.parametrize("role", ROLES)
def test_a_run_goes_on_although_an_index_is_damaged_while_it_trains(role, exact, tmp_path):
    """The run that wrote it needs nothing from it but the state before, which the index before has too."""
    data, plan, folder = exact

    def damage(line: Any) -> None:
        if line.epoch in (2, 3):
            (tmp_path / role / "checkpoints.json").write_bytes(b"")

    result = Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=damage)
    assert spans_of(result) == [(0, 4 * PER_EPOCH)]
    assert_same_weights(tmp_path, folder / "run")
    kept = Checkpoints(folder=tmp_path / role, plan=plan)
    assert kept.run_id is not None
    for number in kept.rounds(kept.run_id):  # what it says it has, it has
        kept.load(kept.run_id, number)
    assert max(kept.rounds(kept.run_id)) == 4 * PER_EPOCH


def test_of_the_index_before_only_states_with_whole_weights_are_offered(data, make_plan, tmp_path):
    plan, run = make_plan(data, num_epochs=4), bytes(8)
    kept = Checkpoints(folder=tmp_path, plan=plan)
    for number in (4, 8, 12):
        kept.save(run, number, {"weight": torch.full((2,), float(number))})
    assert kept.rounds(run) == [8, 12]
    (tmp_path / "checkpoints.json").write_bytes(b"")
    assert kept.rounds(run) == [8]  # the weights of round 4 are gone
    assert kept.load(run, 8)["weight"].tolist() == [8.0, 8.0]
    with pytest.raises(CheckpointError, match="no checkpoint of round=12"):
        kept.load(run, 12)
    (weights_of_8,) = tmp_path.glob("round-0000008-*")
    flip(weights_of_8, 8 * (weights_of_8.stat().st_size - 1))
    with pytest.raises(CheckpointError, match=r"checkpoints\.json cannot be read"):
        kept.rounds(run)
    with pytest.raises(CheckpointError, match=r"checkpoints\.json cannot be read"):
        kept.load(run, 8)


def test_a_model_is_of_the_last_round_or_of_none(exact, tmp_path):
    _, plan, folder = exact
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "party-1" / "checkpoints.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"party-1/checkpoints\.json cannot be read"):
        newest_common_round(plan, tmp_path / "run", strict=True)


def test_a_damaged_index_does_not_become_the_one_before(data, make_plan, tmp_path):
    plan, run = make_plan(data, num_epochs=4), bytes(8)
    kept = Checkpoints(folder=tmp_path, plan=plan)
    for number in (4, 8):
        kept.save(run, number, {"weight": torch.full((2,), float(number))})
    before = (tmp_path / PREVIOUS).read_bytes()
    (tmp_path / "checkpoints.json").write_bytes(b"")
    kept.save(run, 12, {"weight": torch.zeros(2)})
    assert (tmp_path / PREVIOUS).read_bytes() == before
    assert kept.rounds(run) == [4, 12]
    for number in (4, 12):
        kept.load(run, number)


def test_an_index_that_cannot_be_written_stays_as_it_was(data, make_plan, monkeypatch, tmp_path):
    plan, run = make_plan(data, num_epochs=4), bytes(8)
    kept = Checkpoints(folder=tmp_path, plan=plan)
    for number in (4, 8):
        kept.save(run, number, {"weight": torch.full((2,), float(number))})
    before = (tmp_path / "checkpoints.json").read_bytes()
    for _ in range(2):
        with monkeypatch.context() as patch:
            power_cut_at(patch, 2)
            with pytest.raises(PowerCut):
                kept.save(run, 12, {"weight": torch.zeros(2)})
        assert (tmp_path / "checkpoints.json").read_bytes() == before
        assert kept.rounds(run) == [4, 8]
    kept.save(run, 12, {"weight": torch.zeros(2)})
    assert kept.rounds(run) == [8, 12]
    assert {path.name for path in tmp_path.iterdir()} == files_of(tmp_path)


def test_where_a_file_has_one_name_alone_no_index_before_is_kept(data, make_plan, monkeypatch, tmp_path):
    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    plan, run = make_plan(data, num_epochs=4), bytes(8)
    kept = Checkpoints(folder=tmp_path, plan=plan)
    for number in (4, 8, 12):
        kept.save(run, number, {"weight": torch.full((2,), float(number))})
    assert kept.rounds(run) == [8, 12]
    assert {path.name for path in tmp_path.iterdir()} == files_of(tmp_path) - {PREVIOUS}
    (tmp_path / "checkpoints.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoints\.json cannot be read"):
        kept.rounds(run)


# --- how much is written ---


def test_what_is_written_each_epoch_does_not_grow_with_the_epochs(data, make_plan, tmp_path):
    plan = make_plan(data, mechanism="none", num_epochs=40, evaluation="none")
    sizes: list[list[int]] = []

    def measure(_: object) -> None:
        paths = [tmp_path / role / "checkpoints.json" for role in ROLES]
        sizes.append([path.stat().st_size for path in (*paths, tmp_path / "server" / "history.jsonl")])

    Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=measure)
    *indexes, history = zip(*sizes, strict=True)
    for index in indexes:
        assert index[-1] <= index[1] + 100  # digits of the rounds and of the seconds
    grown = np.diff(history)
    assert grown.max() <= grown.min() + 40


def test_epochs_of_a_checkpoint_of_format_2_are_read(exact, tmp_path):
    """It had all of them in its index, once for each state."""
    data, plan, folder = exact
    shutil.copytree(folder / "epoch-3", tmp_path / "run")
    server = tmp_path / "run" / "server"
    lines = [json.loads(line) for line in (server / "history.jsonl").read_text().splitlines()]
    epochs = [{name: value for name, value in line.items() if name != "before"} for line in lines]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]

    def as_before(index: dict[str, Any]) -> None:
        index["format"] = 2
        for state in index["states"]:
            state["notes"].update(history=epochs[: state["completed_rounds"] // PER_EPOCH])

    change_index(server, as_before)
    (server / "history.jsonl").unlink()
    for role in ROLES[1:]:
        change_index(tmp_path / "run" / role, lambda index: index.update(format=2))
    result = Federation(plan).fit(data, checkpoints=tmp_path / "run")
    assert spans_of(result)[1] == (3 * PER_EPOCH, 4 * PER_EPOCH)
    assert [line.to_dict() for line in result.history[:3]] == epochs
    assert_same_weights(tmp_path / "run", folder / "run")


@pytest.mark.parametrize("damage", ["cut", "gone", "changed", "torn"])
def test_epochs_that_are_not_those_of_the_checkpoint_are_refused_by_name(damage, exact, tmp_path):
    """But what a killed process left of a line after them says nothing, and does no harm."""
    data, plan, folder = exact
    shutil.copytree(folder / "epoch-3", tmp_path / "run")
    path = tmp_path / "run" / "server" / "history.jsonl"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "gone": b"",
            "changed": whole.replace(b'"epoch": 2', b'"epoch": 7'),
            "torn": whole + whole[:50],
        }[damage]
    )
    if damage == "torn":
        result = Federation(plan).fit(data, checkpoints=tmp_path / "run")
        assert [line.epoch for line in result.history] == [1, 2, 3, 4]
        resumed = HistoryLog(path).read(hashlib.sha256(path.read_bytes().splitlines()[-1]).hexdigest())
        assert resumed == list(result.history)
    else:
        assert str(path) in refused(plan, data, tmp_path / "run")


# --- other plans, runs and versions ---


@pytest.mark.parametrize("role", ["server", "party-1"])
def test_a_role_s_checkpoints_of_another_plan_are_refused_by_what_differs(role, interrupted, data, tmp_path):
    plan, folder = interrupted
    with pytest.raises(Killed):
        Federation(plan.replace(beta=0.125)).fit(data, checkpoints=tmp_path / "other", on_epoch=killer())
    shutil.rmtree(folder / role)
    shutil.copytree(tmp_path / "other" / role, folder / role)
    words = refused(plan, data, folder)
    assert str(folder / role / "checkpoints.json") in words
    assert "beta=0.125, this plan has beta=0.25" in words


@pytest.mark.parametrize("role", ROLES)
def test_a_role_s_checkpoints_of_another_run_are_refused_by_name(role, interrupted, data, tmp_path):
    plan, folder = interrupted
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path / "other", on_epoch=killer())
    shutil.rmtree(folder / role)
    shutil.copytree(tmp_path / "other" / role, folder / role)
    words = refused(plan, data, folder)
    assert "of another run" in words
    assert str(folder / ("party-0" if role == "server" else role)) in words


def test_a_state_is_found_only_under_its_own_run(interrupted):
    plan, folder = interrupted
    kept = Checkpoints(folder=folder / "party-0", plan=plan)
    assert kept.run_id is not None
    assert kept.rounds(kept.run_id) == [4, 8]
    assert kept.rounds(b"stranger") == []
    for look in (kept.load, kept.notes_of):
        with pytest.raises(CheckpointError, match=rf"party-0 has no checkpoint of round=8 of run {b'stranger'.hex()}"):
            look(b"stranger", 8)
        with pytest.raises(CheckpointError, match="no checkpoint of round=5"):
            look(kept.run_id, 5)


def test_checkpoints_of_version_0_1_are_refused_by_name(data, make_plan, tmp_path):
    """All roles' weights lay in one folder there, beside a checkpoint.json."""
    plan = make_plan(data)
    (tmp_path / "run" / "round-0000004").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint.json").write_text(json.dumps({"completed_rounds": 4, "weights": "round-0000004"}))
    words = refused(plan, data, tmp_path / "run")
    assert str(tmp_path / "run") in words
    assert "version 0.1" in words


@pytest.mark.parametrize("role", ["server", "party-1"])
def test_an_index_of_a_later_format_is_refused_by_name(role, interrupted, data):
    plan, folder = interrupted
    change_index(folder / role, lambda index: index.update(format=4))
    words = refused(plan, data, folder)
    assert str(folder / role / "checkpoints.json") in words
    assert "format=4" in words


# --- which round a session begins with ---


class Roles:
    """A server and its parties with their checkpoints, driven by hand up to the nonces."""

    def __init__(self, plan: Plan, data: VerticalDataset, folder: Path) -> None:
        setups = Federation(plan).party_setups(data, None, folder, 1)
        self.parties = [setup.build() for setup in setups]
        kept = Checkpoints(folder=folder / "server", plan=plan)
        self.server = Server(plan, train_labels=data.train_labels, run_id=kept.run_id, keeper=kept)
        self.exchange(self.advance())
        self.nonces = self.advance()

    def advance(self) -> bytes:
        message = self.server.advance()
        assert message is not None
        return message

    def exchange(self, message: bytes) -> None:
        for party in self.parties:
            self.server.receive(party.answer(message))

    def nonces_for(self, first_round: int) -> bytes:
        """What a server would send for another first round, with everything else as it must be."""
        message = Message.from_bytes(self.nonces)
        payload = bytes(message.payload)
        nonces = [payload[at : at + 32] for at in range(32, len(payload), 32)]
        assert len(nonces) == len(self.parties)
        session = Session.open(plan_hash=payload[:32], run_id=message.run_id, nonces=nonces, first_round=first_round)
        forged = message._replace(round_number=first_round, session_id=session.id, payload=payload).to_bytes()
        assert (forged == self.nonces) == (first_round == message.round_number)
        return forged


@pytest.mark.parametrize("first_round", [1, 3, 5, 12, 16, 1000])
def test_a_party_does_not_begin_with_a_round_that_it_has_no_checkpoint_of(first_round, interrupted, data):
    plan, folder = interrupted
    roles = Roles(plan, data, folder)
    assert Message.from_bytes(roles.nonces).round_number == 8
    forged = roles.nonces_for(first_round)
    party = roles.parties[1]
    with pytest.raises(OutOfOrder, match=f"round={first_round}: this party has no checkpoint of it"):
        party.answer(forged)
    refusal = Message.from_bytes(party.receive(forged))
    assert refusal.kind is MessageKind.REFUSAL
    assert Refusal.from_payload(refusal.payload).code is RefusalCode.MESSAGE
    assert party.completed_rounds == 0
    # It stayed as it was: the right message opens the session.
    assert Message.from_bytes(party.answer(roles.nonces)).kind is MessageKind.KEY
    assert party.completed_rounds == 8


def test_a_party_without_checkpoints_begins_with_round_0_alone(interrupted, data):
    plan, folder = interrupted
    shutil.rmtree(folder / "party-2")
    roles = Roles(plan, data, folder)
    assert Message.from_bytes(roles.nonces).round_number == 0
    for first_round in (4, 8):
        with pytest.raises(OutOfOrder, match="it can begin with round 0"):
            roles.parties[2].answer(roles.nonces_for(first_round))


def keys_for(roles: Roles, session_id: bytes, keys: list[bytes]) -> bytes:
    message = Message.from_bytes(roles.nonces)
    return message._replace(
        kind=MessageKind.KEYS, session_id=session_id, round_number=0, payload=b"".join(keys)
    ).to_bytes()


@pytest.mark.parametrize("told", [(8, 4, 8), (4, 8, 8), (0, 8, 8), (8, 8, 4), (0, 4, 8)])
def test_parties_that_were_told_different_first_rounds_cannot_finish_the_handshake(told, interrupted, data):
    plan, folder = interrupted
    roles = Roles(plan, data, folder)
    answers = [
        Message.from_bytes(party.answer(roles.nonces_for(first)))
        for party, first in zip(roles.parties, told, strict=True)
    ]
    keys = [bytes(answer.payload) for answer in answers]
    for party, answer in zip(roles.parties, answers, strict=True):
        with pytest.raises(IdentityError, match="its session key is not signed by its pinned identity"):
            party.answer(keys_for(roles, answer.session_id, keys))
        with pytest.raises(OutOfOrder, match="the handshake is not finished"):
            party.answer(answer._replace(kind=MessageKind.ROUND, sender=0xFFFF, payload=b"").to_bytes())


def test_parties_that_were_told_the_same_first_round_finish_the_handshake(interrupted, data):
    """By the same steps as above: it is the difference that is refused."""
    plan, folder = interrupted
    roles = Roles(plan, data, folder)
    answers = [Message.from_bytes(party.answer(roles.nonces_for(4))) for party in roles.parties]
    keys = [bytes(answer.payload) for answer in answers]
    for party, answer in zip(roles.parties, answers, strict=True):
        assert party.answer(keys_for(roles, answer.session_id, keys)) == b""
        assert party.completed_rounds == 4


# --- results of version 0.1 ---


@pytest.mark.parametrize("kind", [str, Path])
def test_a_result_of_version_1_is_read(kind):
    """It counted uses of train rows and of test rows, and wrote its plan flat and its history as plain values."""
    written = json.loads(OLD_RESULT.read_text())
    assert "version" not in written
    assert written["row_uses"] == {"train": 4, "test": 1}
    result = Result.read(kind(OLD_RESULT))
    assert {name: result.plan.flat()[name] for name in written["plan"]} == written["plan"]
    assert shown_uses(result.row_uses) == {"joint": (4, 4, 4 * 40), "prediction": (1, 0, 10)}
    assert [line.to_dict() for line in result.history] == written["history"]
    assert result.metrics == written["metrics"]
    assert result.traffic.to_dict() == written["traffic"]
    assert result.seconds == written["seconds"]
    found = [session.to_dict() for session in result.sessions]
    assert [each.pop("public_start") for each in found] == [True] * len(found)
    assert found == written["sessions"]
    assert result.notes == written["notes"]
    assert (result.stopped, result.noise_is_seeded) == ("", False)


def test_a_result_of_version_1_has_the_epsilons_that_it_was_written_with_or_tighter_ones():
    written = json.loads(OLD_RESULT.read_text())["privacy"]
    table = Result.read(OLD_RESULT).privacy()
    assert len(written) == 6
    for row in written:
        assert 0.95 * row["epsilon"] <= table.epsilon(row["unit"], row["accounting"]) <= row["epsilon"] * (1 + 1e-9)


def test_a_result_of_version_1_is_written_and_read_as_one_of_this_version(tmp_path):
    old = Result.read(OLD_RESULT)
    path = tmp_path / "result.json"
    path.write_text(old.to_json())
    assert json.loads(path.read_text())["version"] == 3
    assert Result.read(path) == old


@pytest.mark.parametrize(
    "change", [{"version": 4}, {"row_uses": {"train": 4}}, {"row_uses": {"train": 4, "test": "1"}}], ids=str
)
def test_another_result_is_refused_by_name(change, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(json.loads(OLD_RESULT.read_text()) | change))
    with pytest.raises(RunFolderError, match=r"result\.json"):
        Result.read(path)

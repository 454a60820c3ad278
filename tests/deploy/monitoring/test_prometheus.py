"""Metrics of a site: text that Prometheus reads, and a port that only this machine reaches."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pbmvfl.deploy.monitoring import prometheus
from pbmvfl.deploy.monitoring.prometheus import MetricsPort, metrics_text
from pbmvfl.deploy.monitoring.status import EpsilonSpent, Role, State, Status, StatusFile
from pbmvfl.errors import FederationError

LIMIT = 'cell, strict, "server"\\ + 1'


def status(**changes: object) -> Status:
    values = {
        "site": "bank",
        "role": Role.PARTY,
        "state": State.TRAINING,
        "round": 41,
        "rounds_total": 90,
        "rounds_per_second": 12.5,
        "bytes_up": 2**40 + 1,
        "bytes_down": 7,
        "epsilon": (EpsilonSpent(limit=LIMIT, spent=1.25, epsilon=8.0, delta=1e-5),),
    }
    return Status(**{**values, **changes})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prometheus, "_PATIENCE", 60.0)  # however busy the machine is
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status().to_dict()))
    return path


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, as Prometheus' own parser reads it."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert {family.type for family in families} <= {"gauge", "counter"}
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def ask(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(request)
        line.shutdown(socket.SHUT_WR)
        answer = b""
        while part := line.recv(65536):
            answer += part
        return answer


def test_every_number_of_the_status_is_read_back() -> None:
    found = parse(metrics_text(status()))
    none: frozenset[tuple[str, str]] = frozenset()
    limit = frozenset({("limit", LIMIT)})
    assert found["pbmvfl_round", none] == 41
    assert found["pbmvfl_rounds_planned", none] == 90
    assert found["pbmvfl_rounds_per_second", none] == 12.5
    assert found["pbmvfl_bytes_total", frozenset({("direction", "up")})] == 2**40 + 1
    assert found["pbmvfl_bytes_total", frozenset({("direction", "down")})] == 7
    assert found["pbmvfl_epsilon_spent", limit] == 1.25
    assert found["pbmvfl_epsilon_limit", limit] == 8
    assert found["pbmvfl_state", frozenset({("state", "training")})] == 1
    assert sum(value for (name, _), value in found.items() if name == "pbmvfl_state") == 1
    assert ("pbmvfl_parties_alive", none) not in found
    served = parse(metrics_text(status(role=Role.SERVER, parties=("a", "b", "c"), parties_alive=("a", "c"), loss=0.25)))
    assert served["pbmvfl_parties_alive", none] == 2
    assert served["pbmvfl_parties", none] == 3
    assert served["pbmvfl_loss", none] == 0.25


def test_numbers_that_are_not_finite_are_spelled_as_the_format_has_them() -> None:
    spent = (EpsilonSpent(limit="cell", spent=math.inf, epsilon=8, delta=1e-5),)
    text = metrics_text(status(epsilon=spent, loss=math.nan))
    assert 'pbmvfl_epsilon_spent{limit="cell"} +Inf\n' in text
    assert "pbmvfl_loss NaN\n" in text
    parse(text)


def test_up_is_whether_a_process_is_alive_and_at_work(tmp_path: Path) -> None:
    none: frozenset[tuple[str, str]] = frozenset()

    def up(status: Status | None) -> float:
        return parse(metrics_text(status))["pbmvfl_up", none]

    with StatusFile(tmp_path / "status.json", site="a", role="party") as told:
        assert up(told.now) == 1
        assert up(replace(told.now, process_started="another")) == 0
        told.update(state=State.DONE)
        assert up(told.now) == 0
    assert up(None) == 0


def test_the_port_answers_with_the_newest_status(file: Path) -> None:
    with closing(MetricsPort(file, 0)) as metrics:
        for number in (41, 42):
            file.write_text(json.dumps(status(round=number).to_dict()))
            line = http.client.HTTPConnection("127.0.0.1", metrics.port, timeout=60)
            line.request("GET", "/metrics")
            answer = line.getresponse()
            assert answer.status == 200
            assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
            assert parse(answer.read().decode())["pbmvfl_round", frozenset()] == number
            line.close()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 404),
        (b"GET /metrics/../../etc/passwd HTTP/1.0\r\n\r\n", 404),
        (b"GET /metrics?x=<script> HTTP/1.0\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.0\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 403),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 403),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.0\r\n\r\n", 414),
        (b"\x16\x03\x01 <script>\r\n\r\n", 400),
    ],
)
def test_anything_but_get_metrics_is_an_empty_refusal(file: Path, request_: bytes, code: int) -> None:
    with closing(MetricsPort(file, 0)) as metrics:
        try:
            answer = ask(metrics.port, request_)
        except ConnectionError:  # it is closed before all of a long request was read
            answer = b""
        assert not answer or f" {code} ".encode() in answer.split(b"\r\n")[0]
        assert answer or code in (400, 414)
        assert b"script" not in answer
        assert b"pbmvfl_" not in answer
        assert b" 200 " in ask(metrics.port, b"GET /metrics HTTP/1.0\r\nHost: localhost:9\r\n\r\n")


def test_no_other_address_of_this_machine_reaches_the_port(file: Path) -> None:
    with closing(MetricsPort(file, 0)) as metrics:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", metrics.port), timeout=60)
        assert b" 200 " in ask(metrics.port, b"GET /metrics HTTP/1.0\r\n\r\n")


def test_readers_that_say_nothing_or_say_it_slowly_do_not_hold_the_port(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "_PATIENCE", 0.2)
    with closing(MetricsPort(file, 0)) as metrics:
        silent = socket.create_connection(("127.0.0.1", metrics.port))
        slow, stop = socket.create_connection(("127.0.0.1", metrics.port)), threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for _ in range(6000):
                    slow.sendall(b"G")
                    if stop.wait(0.01):
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        answer = b""
        for _ in range(100):  # on a busy machine one of ours may be too slow as well
            with contextlib.suppress(ConnectionError):
                answer = ask(metrics.port, b"GET /metrics HTTP/1.0\r\n\r\n")
            if answer:
                break
        assert b" 200 " in answer
        stop.set()
        thread.join()
        silent.close()
        slow.close()


@pytest.mark.parametrize("port", [-1, 65536, True, "9000", None])
def test_a_port_out_of_range_is_named(file: Path, port: object) -> None:
    with pytest.raises(FederationError, match=re.escape(f"port={port!r}")):
        MetricsPort(file, port)


def test_a_port_that_is_taken_is_named_with_a_way_out(file: Path) -> None:
    with closing(MetricsPort(file, 0)) as first, pytest.raises(FederationError, match="give another"):
        MetricsPort(file, first.port)


def test_a_closed_port_is_free_again(file: Path) -> None:
    with closing(MetricsPort(file, 0)) as first:
        port = first.port
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"")

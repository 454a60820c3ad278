"""Prometheus metrics of a site's status: text format 0.0.4 at http://127.0.0.1:PORT/metrics, on this machine alone.

No other address is possible: what a party has spent is for its own operators. To collect from elsewhere, put an
authenticating proxy in front. Only GET /metrics is answered; everything else gets an empty refusal.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from pbmvfl.deploy.monitoring.status import State, Status, read_status
from pbmvfl.errors import FederationError

ADDRESS, PATH = "127.0.0.1", "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Timeout of one request in seconds, so that a silent or slow client does not block the port.
_PATIENCE = 5.0

#: One sample: its labels and its value.
_Sample = tuple[Mapping[str, str], float]


def metrics_text(status: Status | None) -> str:
    """Return all metrics of a status; without one, only that nothing is up."""
    parts: list[str] = []

    def add(name: str, kind: str, help_: str, samples: Iterable[_Sample]) -> None:
        found = list(samples)
        if found:
            parts.append(f"# HELP {name} {help_}\n# TYPE {name} {kind}\n")
            parts.extend(_line(name, labels, value) for labels, value in found)

    is_up = status is not None and not status.state.is_over and status.process_is_alive
    add("pbmvfl_up", "gauge", "1 while a job's process is alive and at work, else 0.", [({}, float(is_up))])
    if status is None:
        return "".join(parts)
    who = {"site": status.site, "role": str(status.role), "work": status.work, "run": status.run, "job": status.job}
    add("pbmvfl_job_info", "gauge", "1, with what the site and its job are called.", [(who, 1.0)])
    states = [({"state": str(each)}, float(each is status.state)) for each in State]
    add("pbmvfl_state", "gauge", "1 for the state that the job is in, 0 for the others.", states)
    add("pbmvfl_round", "gauge", "Rounds that are completed.", [({}, float(status.round))])
    add("pbmvfl_rounds_planned", "gauge", "Rounds of the whole plan.", [({}, float(status.rounds_total))])
    add("pbmvfl_rounds_per_second", "gauge", "Over the last seconds.", _known(status.rounds_per_second))
    add("pbmvfl_loss", "gauge", "At the server, from the protocol's own noisy sums.", _known(status.loss))
    carried = (("up", status.bytes_up), ("down", status.bytes_down))
    amounts = [({"direction": direction}, float(count)) for direction, count in carried]
    add("pbmvfl_bytes_total", "counter", "Bytes of messages; up is from parties to the server.", amounts)
    if status.parties:
        add("pbmvfl_parties", "gauge", "Parties of the federation.", [({}, float(len(status.parties)))])
        add("pbmvfl_parties_alive", "gauge", "Those that are connected.", [({}, float(len(status.parties_alive)))])
    spent = [({"limit": each.limit}, each.spent) for each in status.epsilon]
    add("pbmvfl_epsilon_spent", "gauge", "What the ledger has charged against each limit of the owner.", spent)
    limits = [({"limit": each.limit}, each.epsilon) for each in status.epsilon]
    add("pbmvfl_epsilon_limit", "gauge", "The limits themselves.", limits)
    news = "When the job last said something, in seconds since 1970."
    add("pbmvfl_last_news_timestamp_seconds", "gauge", news, _known(status.updated))
    add("pbmvfl_start_timestamp_seconds", "gauge", "When the job began, in the same.", _known(status.started))
    return "".join(parts)


class MetricsPort:
    """HTTP server of the metrics, in a daemon thread."""

    def __init__(self, status: Path, port: int) -> None:
        """Start serving.

        Args:
            status: The site's status file, read at every request.
            port: The port; 0 for a free one.
        """
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise FederationError(f"port={port!r} of the metrics must be an integer in 0..65535; 0 takes a free one")
        handler = type("_Handler", (_Handler,), {"status_file": Path(status)})
        try:
            self._server = _Server((ADDRESS, port), handler)
        except OSError as error:
            raise FederationError(
                f"port={port} of the metrics on {ADDRESS} cannot be used: {error.strerror}; give another"
            ) from error
        # It polls for shutdown ten times a second, so that a job's end does not wait for it.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="pbmvfl-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=_PATIENCE)

    def __enter__(self) -> MetricsPort:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class _Server(HTTPServer):
    """HTTP server without request threads, so that no client can exhaust them; errors stay within a connection."""

    request_queue_size = 8
    allow_reuse_address = True

    def server_bind(self) -> None:
        # The base class looks up the machine's full name, which can block on a network.
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def finish_request(self, request: Any, client_address: Any) -> None:
        def cut() -> None:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(_PATIENCE, cut)
        timer.daemon = True
        timer.start()
        try:
            super().finish_request(request, client_address)
        finally:
            timer.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET /metrics alone."""

    server_version, sys_version = "pbmvfl", ""
    protocol_version = "HTTP/1.0"
    status_file: Path

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        # A web page in a browser on this machine can send requests too, by a name of its own that resolves here.
        host = self.headers.get("Host", ADDRESS).rpartition(":")[0] or self.headers.get("Host", ADDRESS)
        if host not in (ADDRESS, "localhost"):
            self._refuse(403)
        elif self.command != "GET":
            self._refuse(405)
        elif self.path != PATH:
            self._refuse(404)
        else:
            return True
        return False

    def do_GET(self) -> None:
        body = metrics_text(read_status(self.status_file)).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse without repeating the request."""
        del message, explain
        self._refuse(code)

    def _refuse(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the access log: a request is no event."""


def _known(value: float | None) -> list[_Sample]:
    return [] if value is None else [({}, value)]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {_number(value)}\n" if shown else f"{name} {_number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else f"{value:.15g}"

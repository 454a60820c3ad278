"""Prometheus metrics of a site's status, by prometheus_client, at http://127.0.0.1:PORT/metrics, on this machine alone.

No other address is possible: what a party has spent is for its own operators. To collect from elsewhere, put an
authenticating proxy in front. Only GET /metrics is answered; everything else gets an empty refusal.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pbmvfl.deploy.monitoring.status import State, Status, read_status
from pbmvfl.errors import FederationError

ADDRESS, PATH = "127.0.0.1", "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Timeout of one request in seconds, so that a silent or slow client does not block the port.
_PATIENCE = 5.0


def metrics_text(status: Status | None) -> str:
    """Return all metrics of a status; without one, only that nothing is up."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    return generate_latest(registry).decode()


class _StatusCollector(Collector):
    """Metrics of one status, in the order of the text."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        is_up = status is not None and not status.state.is_over and status.process_is_alive
        yield _gauge("pbmvfl_up", "1 while a job's process is alive and at work, else 0.", is_up)
        if status is None:
            return
        who = {"site": status.site, "role": str(status.role), "work": status.work, "run": status.run, "job": status.job}
        yield _gauges("pbmvfl_job_info", "1, with what the site and its job are called.", [(who, 1)])
        states = [({"state": str(each)}, each is status.state) for each in State]
        yield _gauges("pbmvfl_state", "1 for the state that the job is in, 0 for the others.", states)
        yield _gauge("pbmvfl_round", "Rounds that are completed.", status.round)
        yield _gauge("pbmvfl_rounds_planned", "Rounds of the whole plan.", status.rounds_total)
        yield _gauge("pbmvfl_rounds_per_second", "Over the last seconds.", status.rounds_per_second)
        yield _gauge("pbmvfl_loss", "At the server, from the protocol's own noisy sums.", status.loss)
        traffic = CounterMetricFamily(
            "pbmvfl_bytes", "Bytes of messages; up is from parties to the server.", labels=["direction"]
        )
        traffic.add_metric(["up"], status.bytes_up)
        traffic.add_metric(["down"], status.bytes_down)
        yield traffic
        if status.parties:
            yield _gauge("pbmvfl_parties", "Parties of the federation.", len(status.parties))
            yield _gauge("pbmvfl_parties_alive", "Those that are connected.", len(status.parties_alive))
        spent = [({"limit": each.limit}, each.spent) for each in status.epsilon]
        yield _gauges("pbmvfl_epsilon_spent", "What the ledger has charged against each limit of the owner.", spent)
        limits = [({"limit": each.limit}, each.epsilon) for each in status.epsilon]
        yield _gauges("pbmvfl_epsilon_limit", "The limits themselves.", limits)
        news = "When the job last said something, in seconds since 1970."
        yield _gauge("pbmvfl_last_news_timestamp_seconds", news, status.updated)
        yield _gauge("pbmvfl_start_timestamp_seconds", "When the job began, in the same.", status.started)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return _gauges(name, text, [] if value is None else [({}, value)])


def _gauges(name: str, text: str, samples: Sequence[tuple[dict[str, str], float]]) -> Metric:
    metric = GaugeMetricFamily(name, text)
    for labels, value in samples:
        metric.add_sample(name, labels, float(value))
    return metric


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


class _Server(socketserver.TCPServer):
    """Server without request threads, so that no client can exhaust them; errors stay within a connection.

    `HTTPServer` would look up the machine's full name, which can block on a network.
    """

    request_queue_size = 8
    allow_reuse_address = True

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

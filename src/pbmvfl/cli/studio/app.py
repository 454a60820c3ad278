"""Server of `pbmvfl studio`: settings in, what `pbmvfl plan --json` says out, on loopback and read-only."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pbmvfl._files import read_object
from pbmvfl._text import for_json
from pbmvfl.cli.data_options import KnownData
from pbmvfl.cli.descriptions import describe_plan
from pbmvfl.cli.options import AskedBudget
from pbmvfl.cli.plan import make_plan, plan_to_dict
from pbmvfl.errors import LedgerError, PbmvflError, PlanError, RunFolderError
from pbmvfl.ledger.database import ENDING
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.groups import Algorithm
from pbmvfl.plan.search import PlannedBudget
from pbmvfl.privacy.table import UNITS_LEGEND, format_epsilon, privacy_table
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.epsilon_history import splits_apart
from pbmvfl.report.gauges import risk_gauges, verdict
from pbmvfl.wire.traffic import human_bytes

#: Settings whose answers are kept.
_KEPT = 4096
#: Line of the time estimate: bits a second, seconds a round trip, and round trips of the handshake.
_BITS, _ROUND_TRIP, _HANDSHAKE = 1e8, 0.02, 4
#: Records of the planner's benchmark that an estimate looks at; the middle half of them is its band.
_NEAREST = 8
_MOST_RUNS = 200
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


# --- Settings ---


@dataclass(frozen=True, kw_only=True)
class Control:
    """One setting of the page: its range or choices, and the value that the page opens with."""

    name: str
    title: str
    usual: str
    least: float = 0
    most: float = 0
    whole: bool = False
    choices: tuple[str, ...] = ()
    #: The setting may be `none`; says what that means.
    without: str = ""

    def read(self, text: str) -> Any:
        """Return the value that a text names.

        Raises:
            PlanError: It is not permitted.
        """
        if self.choices:
            if text not in self.choices:
                raise PlanError(f"{self.name}={text!r}; permitted: {', '.join(self.choices)}")
            return text
        if self.without and text == "none":
            return None
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            kind = "a whole number" if self.whole else "a number"
            more = ", or none" if self.without else ""
            raise PlanError(f"{self.name}={text!r}; permitted: {kind} from {self.least:g} to {self.most:,.15g}{more}")
        return value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of all controls, by the names of `pbmvfl plan`."""

    num_samples: int
    num_parties: int
    columns: int
    num_classes: int
    algorithm: str
    unit: str
    epsilon: float
    label_epsilon: float | None
    prediction_epsilon: float | None

    @property
    def command(self) -> str:
        """The command that makes the same plan."""
        values = {name: value for name, value in asdict(self).items() if (name, value) != ("prediction_epsilon", None)}
        texts = {
            name: f"{value:.15g}" if isinstance(value, float) else value or "none" for name, value in values.items()
        }
        options = (f"--{name.replace('_', '-')} {text}" for name, text in texts.items())
        return f"pbmvfl plan {' '.join(options)} --out plan.json"


CONTROLS = (
    Control(name="num_samples", title="Training rows", usual="10000", least=10, most=10_000_000, whole=True),
    Control(name="num_parties", title="Parties", usual="3", least=2, most=50, whole=True),
    Control(name="columns", title="Columns of a party, at most", usual="12", least=1, most=5_000, whole=True),
    Control(name="num_classes", title="Classes", usual="2", least=2, most=50, whole=True),
    Control(name="algorithm", title="Algorithm", usual="staged", choices=("staged", "pbm")),
    Control(name="unit", title="The epsilon protects a", usual="cell", choices=("cell", "record", "party")),
    Control(name="epsilon", title="Epsilon of training", usual="4", least=0.05, most=50),
    Control(
        name="label_epsilon",
        title="Epsilon of a label",
        usual="4",
        least=0.01,
        most=16,
        without="in clear to the parties",
    ),
    Control(
        name="prediction_epsilon",
        title="Epsilon of a predicted row",
        usual="4",
        least=0.05,
        most=16,
        without="none predicted in training",
    ),
)


def read_settings(values: list[tuple[str, str]]) -> Settings:
    """Return the settings of a query; what it leaves out is as the page opens.

    Raises:
        PlanError: A name is unknown or given twice, or a value is not permitted.
    """
    known = {each.name: each for each in CONTROLS}
    found = {each.name: each.usual for each in CONTROLS}
    seen = set()
    for name, text in values:
        if name not in known:
            raise PlanError(f"{name[:40]!r} is no setting; permitted: {', '.join(known)}")
        if name in seen:
            raise PlanError(f"{name} is given twice; give it once")
        seen.add(name)
        found[name] = text
    return Settings(**{name: known[name].read(text[:40]) for name, text in found.items()})


# --- Answers ---


def make(settings: Settings) -> PlannedBudget:
    """Plan as `pbmvfl plan` does with the options of `Settings.command`."""
    sizes = {name: getattr(settings, name) for name in ("num_parties", "num_samples", "num_classes")}
    budget = AskedBudget(
        epsilon=settings.epsilon,
        unit=settings.unit,
        accounting=Accounting.STRICT,
        prediction_epsilon=settings.prediction_epsilon,
    )
    choices = {**sizes, "algorithm": settings.algorithm, "label_epsilon": settings.label_epsilon}
    return make_plan(KnownData(sizes=sizes, columns=settings.columns), budget, choices)


@lru_cache(maxsize=_KEPT)
def answer(settings: Settings) -> tuple[int, bytes, bytes]:
    """Return the status, the answer as JSON, and the plan's file; without a plan an error, and no file."""
    try:
        planned = make(settings)
        body, plan = {**plan_to_dict(planned), "shown": _shown(settings, planned)}, planned.plan.to_json()
    except PbmvflError as error:
        return 422, json.dumps({"error": str(error)}).encode(), b""
    return 200, json.dumps(body).encode(), plan.encode()


def _shown(settings: Settings, planned: PlannedBudget) -> dict[str, Any]:
    """Return what the page says beside the numbers of `pbmvfl plan --json`."""
    plan, delta = planned.plan, planned.budget.delta
    run = plan.training_run()
    splits = splits_apart(run) or ("",)
    tables = [privacy_table(run.of_split(rows) if rows else run, delta=delta) for rows in splits]
    released = any(part.split == "test" and part.row_releases for part in run.activities)
    last = tables[-1].bound(Unit.CELL, Accounting.STRICT)
    gauges = risk_gauges(tables[0], [(last.advantage_upper_bound, last.epsilon)] if released else [])
    traffic = plan.traffic()
    seconds = traffic.total * 8 / _BITS + (traffic.rounds + _HANDSHAKE) * _ROUND_TRIP
    return {
        "verdict": verdict(next(each for each in gauges if each.is_worst)),
        "gauges": [
            {**asdict(each), "right": each.right, "epsilon": each.shown_epsilon, "released": each.advantage is not None}
            for each in gauges
        ],
        "bounds": [
            {
                "unit": str(row.unit),
                "from": "all parties" if row.unit is Unit.LABEL else str(row.adversary),
                "epsilon": format_epsilon(row.epsilon),
                "value": for_json(row.epsilon),
                "right": math.ceil(50 + 50 * row.advantage_upper_bound - 1e-12),
                "found": math.ceil(1000 * row.detection_upper_bound - 1e-9),
            }
            for row in plan.privacy(delta=delta).bounds
            if row.accounting is Accounting.STRICT
        ],
        "bytes": human_bytes(traffic.total),
        "rounds": f"{traffic.rounds:,}",
        "seconds": f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min",
        "delta": f"{delta:g}",
        "estimate": estimate(settings),
        "plan": [list(line) for line in describe_plan(plan)],
        "command": settings.command,
        "train": "pbmvfl train DATASET --plan plan.json",
    }


@cache
def _benchmark() -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads(files(__package__).joinpath("assets/benchmark.json").read_text())
    return found


def estimate(settings: Settings) -> dict[str, float] | None:
    """Return a band of accuracy for equally frequent classes, from the nearest records of the planner's benchmark.

    Records are compared by epsilon * rows / (classes * sqrt(columns)), on which learning from noisy steps depends to
    first order, and by how far they get from the rate of the most frequent class to 1. None for another algorithm
    than that of the records.
    """
    if settings.algorithm != Algorithm.STAGED:
        return None

    def signal(epsilon: float, rows: float, classes: float, columns: float) -> float:
        return math.log(epsilon * rows / (classes * math.sqrt(columns)))

    own = signal(settings.epsilon, settings.num_samples, settings.num_classes, settings.columns)
    records = sorted(
        _benchmark(),
        key=lambda each: abs(own - signal(each["epsilon"], each["rows"], each["classes"], each["columns"])),
    )
    shares = sorted((each["accuracy"] - each["majority"]) / (1 - each["majority"]) for each in records[:_NEAREST])
    blind = 1 / settings.num_classes
    low, high = (blind + max(0.0, shares[i]) * (1 - blind) for i in (_NEAREST // 4, -1 - _NEAREST // 4))
    return {"low": round(low, 3), "high": round(high, 3), "blind": round(blind, 3), "records": _NEAREST}


# --- Runs and ledgers ---


def runs_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield name, epsilon (cell, strict, server) and accuracy of each run that has ended and was measured."""
    for path in sorted(folder.glob("*/result.json"))[:_MOST_RUNS]:
        with contextlib.suppress(RunFolderError, KeyError, TypeError, StopIteration):
            found = read_object(path, {"metrics": dict, "privacy": list}, RunFolderError)
            accuracy = found["metrics"].get("test_accuracy", found["metrics"].get("train_accuracy"))
            epsilon = next(
                row["epsilon"]
                for row in found["privacy"]
                if (row["unit"], row["accounting"], row["adversary"], row["colluding_parties"])
                == (Unit.CELL, Accounting.STRICT, "server", 0)
            )
            if accuracy is not None:
                yield {"name": path.parent.name, "epsilon": epsilon, "accuracy": accuracy}


def ledgers_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every limit of every ledger that can be read, with what it has spent."""
    for path in sorted(folder.glob(f"*{ENDING}")):
        with contextlib.suppress(LedgerError, OSError), contextlib.closing(Ledger(path, read_only=True)) as ledger:
            for dataset, about in ledger.export()["datasets"].items():
                for limit in about["limits"]:
                    yield {
                        "owner": ledger.owner or path.stem,
                        "dataset": dataset,
                        "unit": str(limit["unit"]),
                        "limit": limit["epsilon"],
                        "spent": limit["spent_epsilon"],
                    }


# --- HTTP ---


class Guard:
    """Lets in GET requests of this machine's own page: by host, origin and token."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self._refusal(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (refused or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            permitted = " or ".join(sorted(self._hosts))
            return PlainTextResponse(f"host={headers.get('host')!r}; permitted: {permitted}", 421)
        origin = headers.get("origin")
        foreign = origin is not None and origin not in {f"http://{host}" for host in self._hosts}
        if foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse(f"origin={origin!r}; permitted: this page's own", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse(f"method={scope['method']}; permitted: GET", 405, {"allow": "GET, HEAD"})
        given = scope["path"].split("/")[1] if "/" in scope["path"] else ""
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("not found: open the address that `pbmvfl studio` printed", 404)
        return None


def studio_app(token: str, *, port: int, runs: Path, ledger: Path | None = None) -> Starlette:
    """Return the application.

    Args:
        token: First part of every path.
        port: Port of the address that browsers name as host.
        runs: Folder of run folders; need not exist.
        ledger: Folder of ledgers, if any.
    """
    templates = Environment(
        loader=PackageLoader(__package__, "assets"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    assets, css = files(__package__).joinpath("assets"), files("pbmvfl.report").joinpath("templates/page.css")

    def page(_: Request) -> Response:
        html = templates.get_template("studio.html").render(controls=CONTROLS, legend=UNITS_LEGEND)
        return Response(html, media_type="text/html")

    def script(_: Request) -> Response:
        return Response(assets.joinpath("studio.js").read_text(), media_type="text/javascript")

    def style(_: Request) -> Response:
        return Response(css.read_text() + assets.joinpath("studio.css").read_text(), media_type="text/css")

    def plan(request: Request) -> Response:
        status, body, _ = _answer(request)
        return Response(body, status, media_type="application/json")

    def download(request: Request) -> Response:
        status, body, file = _answer(request)
        if status != 200:
            return Response(body, status, media_type="application/json")
        name = {"content-disposition": 'attachment; filename="plan.json"'}
        return Response(file, headers=name, media_type="application/json")

    def history(_: Request) -> Response:
        found = {"runs": list(runs_of(runs)), "ledgers": [] if ledger is None else list(ledgers_of(ledger))}
        return Response(json.dumps(found), media_type="application/json")

    endpoints = {
        "/": page,
        "/studio.js": script,
        "/studio.css": style,
        "/plan": plan,
        "/plan.json": download,
        "/history": history,
    }
    routes = [Route(path, endpoint) for path, endpoint in endpoints.items()]
    guard = Middleware(Guard, token=token, port=port)
    return Starlette(routes=[Mount(f"/{token}", routes=routes)], middleware=[guard])


def _answer(request: Request) -> tuple[int, bytes, bytes]:
    try:
        return answer(read_settings(request.query_params.multi_items()))
    except PlanError as error:
        return 400, json.dumps({"error": str(error)}).encode(), b""


def server_of(app: Starlette) -> uvicorn.Server:
    """Return the server. The token is in every path, so no path is logged."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none", lifespan="off", proxy_headers=False
    )
    return uvicorn.Server(config)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until the process is interrupted. The answer that the page opens with is made while it loads."""
    threading.Thread(target=answer, args=(read_settings([]),), daemon=True).start()
    server_of(app).run(sockets=[listener])

"""Closed set of log events: a fixed sentence for each, and a fixed list of permitted fields."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

from pbmvfl.deploy.monitoring.status import State
from pbmvfl.deploy.site.job_spec import Work


class Event(StrEnum):
    """Event at a site."""

    STARTED = "started"
    ORDER = "order"
    ORDER_REFUSED = "order-refused"
    JOINING = "joining"
    JOINED = "joined"
    HANDSHAKE = "handshake"
    WARMED_UP = "warmed-up"
    FIRST_ROUND = "first-round"
    RESUMED = "resumed"
    PROGRESS = "progress"
    CHECKPOINT = "checkpoint"
    CUT = "cut"
    MENDED = "mended"
    PARTY_LOST = "party-lost"
    REFUSED = "refused"
    ALIGNING = "aligning"
    ALIGNED = "aligned"
    PREDICTED = "predicted"
    SPENT = "spent"
    METRICS_PORT = "metrics-port"
    PRUNED = "pruned"
    STATUS = "status"
    RESUBMITTED = "resubmitted"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    NOTE = "note"
    UNKNOWN = "unknown"


#: Sentences with fields in braces; a part in brackets is dropped if one of its fields is missing.
WORDS: Mapping[Event, str] = {
    Event.STARTED: "the job's process has started",
    Event.ORDER: "accepted an order[ to {work}]",
    Event.ORDER_REFUSED: "refused an order",
    Event.JOINING: "dialling[ {peer}]",
    Event.JOINED: "connected[ with {peer}][ ({alive} of {parties} parties)]",
    Event.HANDSHAKE: "all agree on plan, keys and the order of rows",
    Event.WARMED_UP: "warmed up[ in {seconds} s]",
    Event.FIRST_ROUND: "the first round begins[: round {round} of {rounds}]",
    Event.RESUMED: "goes on from a checkpoint[ at round {round} of {rounds}]",
    Event.PROGRESS: "round {round} of {rounds}[, {rate} rounds a second]",
    Event.CHECKPOINT: "checkpoint[ at round {round}]",
    Event.CUT: "the line is cut[ to {peer}], dialling again",
    Event.MENDED: "the line is mended[ to {peer}][ after {seconds} s]",
    Event.PARTY_LOST: "a party is lost[: {peer}]",
    Event.REFUSED: "a message was refused[ in round {round}]",
    Event.ALIGNING: "looking for common rows[ with {peer}]",
    Event.ALIGNED: "rows are in the common order[: {rows} rows][, {seconds} s]",
    Event.PREDICTED: "predictions are released[: {rows} rows]",
    Event.SPENT: "spent epsilon {epsilon} of {limit}",
    Event.METRICS_PORT: "metrics are on 127.0.0.1[:{port}]",
    Event.PRUNED: "removed {count} old job folders",
    Event.STATUS: "the status cannot be written",
    Event.RESUBMITTED: "submitted again[, attempt {attempt}]",
    Event.DONE: "done[ after {rounds} rounds][, {seconds} s]",
    Event.FAILED: "failed[ in round {round}]",
    Event.STOPPED: "stopped[ in round {round}]",
    Event.NOTE: "",
    Event.UNKNOWN: "an event that this log does not know",
}
LEVELS: Mapping[Event, int] = {
    Event.ORDER_REFUSED: logging.WARNING,
    Event.CUT: logging.WARNING,
    Event.PARTY_LOST: logging.WARNING,
    Event.REFUSED: logging.WARNING,
    Event.STATUS: logging.WARNING,
    Event.RESUBMITTED: logging.WARNING,
    Event.STOPPED: logging.WARNING,
    Event.UNKNOWN: logging.WARNING,
    Event.FAILED: logging.ERROR,
}
_COUNTS = frozenset(
    {"round", "rounds", "rows", "alive", "parties", "count", "attempt", "port", "bytes_up", "bytes_down"}
)
_NUMBERS = frozenset({"seconds", "rate", "epsilon", "limit"})
_OPTIONAL = re.compile(r"\[([^\]]*)\]")


def permitted_fields(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the fields that are known by name and have a permitted value.

    Args:
        fields: Fields of an event.
        names: Names of the federation's organisations; no other name is permitted.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _COUNTS and type(value) is int and 0 <= value < 2**48:
            kept[name] = value
        elif name in _NUMBERS and type(value) in (int, float) and math.isfinite(value):
            kept[name] = float(f"{value:.4g}")
        elif isinstance(value, str) and value in _texts(name, names):
            kept[name] = str(value)
    return kept


def _texts(name: str, names: Collection[str]) -> Collection[str]:
    match name:
        case "peer":
            return names
        case "work":
            return tuple(Work)
        case "state":
            return tuple(State)
    return ()


def sentence(event: Event, fields: Mapping[str, Any]) -> str:
    """Return the event's sentence with the given fields."""

    def part(match: re.Match[str]) -> str:
        try:
            return match[1].format_map(fields)
        except KeyError:
            return ""

    said = _OPTIONAL.sub(part, WORDS[event])
    try:
        return said.format_map(fields)
    except KeyError:
        return event.value.replace("-", " ")

"""Closed set of log events: a fixed sentence for each, and a fixed list of permitted fields."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Event(StrEnum):
    """Event at a site."""

    STARTED = "started"
    HANDSHAKE = "handshake"
    FIRST_ROUND = "first-round"
    RESUMED = "resumed"
    METRICS_PORT = "metrics-port"
    PRUNED = "pruned"
    DONE = "done"
    FAILED = "failed"
    NOTE = "note"
    UNKNOWN = "unknown"


#: Sentences with fields in braces; a part in brackets is dropped if one of its fields is missing.
WORDS: Mapping[Event, str] = {
    Event.STARTED: "the job's process has started",
    Event.HANDSHAKE: "all agree on plan, keys and the order of rows",
    Event.FIRST_ROUND: "the first round begins[: round {round} of {rounds}]",
    Event.RESUMED: "goes on from a checkpoint[ at round {round} of {rounds}]",
    Event.METRICS_PORT: "metrics are on 127.0.0.1[:{port}]",
    Event.PRUNED: "removed[ {count}] old job folders",
    Event.DONE: "done[ after {rounds} rounds]",
    Event.FAILED: "failed[ in round {round}]",
    Event.NOTE: "",
    Event.UNKNOWN: "an event that this log does not know",
}
LEVELS: Mapping[Event, int] = {Event.UNKNOWN: logging.WARNING, Event.FAILED: logging.ERROR}
_COUNTS = frozenset({"round", "rounds", "count", "port"})
_OPTIONAL = re.compile(r"\[([^\]]*)\]")


def permitted_fields(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields that are known by name and are whole numbers."""
    return {name: value for name, value in fields.items() if name in _COUNTS and type(value) is int and value >= 0}


def sentence(event: Event, fields: Mapping[str, Any]) -> str:
    """Return the event's sentence with the given fields."""

    def part(match: re.Match[str]) -> str:
        try:
            return match[1].format_map(fields)
        except KeyError:
            return ""

    return _OPTIONAL.sub(part, WORDS[event])

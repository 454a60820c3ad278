"""A policy.toml to start from: everything that can stand in one, with what it means; most of it is commented out."""

from __future__ import annotations

import json

#: Where comments begin.
_MARGIN = 32
_Lines = list[tuple[str, str] | str]

_WATCH: _Lines = [
    "",
    "# [watch]",
    ("# metrics_port = 9108", "Prometheus text, on 127.0.0.1 alone"),
]
_HOURS: _Lines = [('# hours = "07:00-19:00"', 'by this machine\'s clock; over midnight: "22:00-06:00"')]


def party_template(*, name: str, home: str, num_parties: int, file: str, id: str, dataset: str) -> str:
    """A party's file."""
    lines: _Lines = [
        *_head(name, home),
        ("[data]", ""),
        (f"file = {_quoted(file)}", ".csv or .parquet"),
        (f"id = {_quoted(id)}", "the column by which rows of different organisations are matched"),
        (f"dataset = {_quoted(dataset)}", "what the ledger counts under; never change it for the same people"),
        ('# version = "2026-01"', "change it when columns changed: rows are then predicted, and charged, anew"),
        ('# columns = ["age", "job"]', "default: all but the id"),
        ('# schema = "schema.json"', "of `pbmvfl schema`: ranges and words that everybody may know"),
        "",
        "# What all runs together may ever tell about a row. Compulsory. To raise it later: `pbmvfl ledger limit`.",
        "[[limit]]",
        "epsilon = 8",
        ("delta = 1e-5", "below 1 / number of rows"),
        ('unit = "cell"', "cell: this organisation's values of one row | record: a row at all parties"),
        ('accounting = "strict"', "strict: a theorem | paper: not a proof"),
        "",
        "# Which plans this organisation takes part in.",
        "[plan]",
        (f"smallest_num_parties = {num_parties}", "a sum hides each among the others"),
        ("largest_epsilon = 8", "of one plan, by the strict count, for this unit and delta:"),
        'unit = "cell"',
        "delta = 1e-5",
        ('# mechanisms = ["krr", "pbm"]', "by which rows may be released"),
        ("# needs_secure_aggregation = true", "only sums may be readable"),
        ("# smallest_noise = 1.0", "of training steps, in multiples of what a row is clipped to"),
        "",
        ("# [plan.fields]", "any other name of a plan: one value, some, or a range"),
        '# training = ["local"]',
        "# num_epochs = {most = 200}",
        "",
        "[runs]",
        ("sessions = 100", "a run that was begun so often, after cuts, is refused"),
        *_HOURS,
        ("# alignments = 20", "each tells the label holder which of the ids it names are here"),
        ("# largest_alignment = 100000", "ids that it may name in one"),
        ("# smallest_alignment = 100", "fewer common rows would single out people"),
        ("# until_limit = true", "begin a run although a limit will end it early"),
        "",
        ("# [encoder]", "a network of your own, imported at this site alone:"),
        ('# own = "package.module:function"', "function(plan, index, input_shape) gives a torch module"),
        *_WATCH,
    ]
    return _text(lines)


def label_holder_template(*, name: str, home: str, file: str, id: str, label: str) -> str:
    """The label holder's file."""
    lines: _Lines = [
        *_head(name, home),
        "[data]",
        (f"file = {_quoted(file)}", ".csv or .parquet"),
        (f"id = {_quoted(id)}", "the column by which rows of different organisations are matched"),
        (f"label = {_quoted(label)}", "the column to learn"),
        "",
        "[runs]",
        *_HOURS,
        *_WATCH,
    ]
    return _text(lines)


def _head(name: str, home: str) -> _Lines:
    return [
        f"# What {name} accepts. Private: it stays on this machine, and nothing of it is sent anywhere.",
        f"# Check it with:  pbmvfl policy check --home {home}",
        "",
    ]


def _text(lines: _Lines) -> str:
    written = []
    for line in lines:
        text, comment = line if isinstance(line, tuple) else (line, "")
        written.append(f"{text:{_MARGIN}}  # {comment}" if comment else text)
    return "\n".join(written) + "\n"


def _quoted(text: str) -> str:
    """As TOML writes a text: like JSON."""
    return json.dumps(text)

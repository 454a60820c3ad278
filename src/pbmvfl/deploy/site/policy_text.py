"""Description of a policy for its owner, and a policy.toml to start from."""

from __future__ import annotations

import contextlib
import importlib.util
import json

from pbmvfl._text import counted
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.policy_file import DataSource, PolicyFile, same_subject
from pbmvfl.errors import DataError
from pbmvfl.ledger.database import is_begun
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON
from pbmvfl.plan.policy import Policy
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting

# --- What a policy accepts, in words for its owner; and whether what it names is there ---


#: Largest epsilon that gives practical protection.
_LARGE = 20.0


def columns_in_use(data: DataSource) -> tuple[str, ...]:
    """Return the columns that the organisation takes part with, from the file's header and the schema.

    Raises:
        DataError: If the header or the schema has faults.
    """
    from pbmvfl.data.faults import Faults
    from pbmvfl.data.readers import column_names, feature_names, require_columns, source_of
    from pbmvfl.data.schema import read_schema

    source, faults = source_of(data.file), Faults()
    present = column_names(source, faults)
    said = read_schema(data.schema, faults)
    faults.raise_any()
    assert present is not None
    chosen = data.columns or feature_names(source, present, (data.id, data.label), [])
    wanted = [data.id, *([data.label] if data.label else chosen)]
    require_columns(source, present, wanted, faults)
    said.refuse_absent(present, source.file, faults)
    if not chosen and not data.label:
        faults.add(f"{source.file} has no column beside the id; a party needs at least one")
    faults.raise_any()
    return (data.label,) if data.label else tuple(chosen)


def describe_data(data: DataSource, columns: tuple[str, ...]) -> str:
    """Describe the data source in one line."""
    listed = ", ".join(columns[:6]) + (f" and {len(columns) - 6} more" if len(columns) > 6 else "")
    what = f"label {data.label}" if data.label else f"{counted(len(columns), 'column')}: {listed}"
    schema = f"; schema {data.schema.name}" if data.schema is not None else ""
    return f"{data.file.name}, rows known by {data.id}; {what}{schema}"


def describe_limits(site_folder: SiteFolder, policy: PolicyFile) -> list[str]:
    """Describe each limit, and how it compares with the ledger's. Nothing is written."""
    held: list[Limit] = []
    if is_begun(site_folder.ledger):
        with contextlib.closing(Ledger(site_folder.ledger, owner=site_folder.name, read_only=True)) as ledger:
            held = ledger.limits(policy.dataset)
    return [f"{limit}, {_standing(limit, held)}" for limit in policy.limits]


def _standing(limit: Limit, held: list[Limit]) -> str:
    there = next((each for each in held if same_subject(each, limit)), None)
    if there is None:
        return "will be in the ledger with the next order"
    if (there.epsilon, there.delta) == (limit.epsilon, limit.delta):
        return "as in the ledger"
    now = f"epsilon {there.epsilon:g} at delta {there.delta:g}"
    if limit.epsilon <= there.epsilon and limit.delta <= there.delta:
        return f"will be lowered from {now} with the next order"
    return f"LOOSER than the ledger's {now}: every order is refused until one of them is changed"


def describe_plan_rules(policy: Policy) -> list[str]:
    """Describe the rules for plans, one line each."""
    words = [f"{policy.smallest_num_parties} parties or more"]
    if policy.largest_epsilon is not None:
        words.append(
            f"epsilon {format_epsilon(policy.largest_epsilon)} or less in one plan ({policy.unit}, strict, "
            f"delta {policy.delta:g})"
        )
    if policy.mechanisms is not None:
        words.append(f"rows released by {', '.join(sorted(policy.mechanisms))} alone")
    if policy.needs_secure_aggregation:
        words.append("only sums readable")
    if policy.smallest_noise:
        words.append(f"noise on training steps of {policy.smallest_noise:g} or more")
    words += [f"{name}: {rule}" for name, rule in policy.fields.items()]
    return [*words, "no exact sums, ever"]


def describe_label_rules(policy: Policy) -> list[str]:
    """Describe what the label holder permits plans to show of its labels."""
    drawn = f"training labels drawn with a label epsilon of {policy.largest_label_epsilon:g} or less"
    return [drawn, "or in clear, which every party can read" if policy.allows_clear_labels else "never in clear"]


def describe_run_rules(policy: PolicyFile, *, is_server: bool) -> list[str]:
    """Describe how often and when jobs are accepted."""
    runs = policy.runs
    when = f"between {runs.hours} by this machine's clock" if runs.hours is not None else "at any time of the day"
    if is_server:
        return [when]
    ends = "is begun all the same" if runs.until_limit else "is refused beforehand"
    return [
        when,
        f"{counted(runs.sessions, 'session')} of a run at most; a run that a limit would end early {ends}",
        f"{counted(runs.alignments, 'alignment')} at most, of {runs.largest_alignment:,} ids or fewer, with "
        f"{counted(runs.smallest_alignment, 'common row')} or more",
    ]


def notes(policy: PolicyFile) -> list[str]:
    """Return remarks about settings that are valid and deserve the owner's attention."""
    found = [*policy.notes]
    if policy.data.made_up:
        found.append("[data] made_up: the owner declares that no row is a person's; remove it for rows of people")
    if policy.limits and not any(limit.accounting is Accounting.STRICT for limit in policy.limits):
        found.append('no limit is strict: the paper\'s count is not a proof; add one with accounting = "strict"')
    if policy.data.label and not policy.limits:
        found.append(
            "no [[limit]]: labels may be drawn anew, by another label epsilon or version, as often as plans ask for it"
        )
    for limit in policy.limits:
        if limit.epsilon > _LARGE:
            found.append(f"epsilon {limit.epsilon:g} protects nobody in practice; 8 is usual")
    if policy.encoder is not None and not _can_be_found(policy.encoder):
        found.append(f"[encoder] own={policy.encoder!r}: this Python has no such package; install it here")
    return found


def _can_be_found(function: str) -> bool:
    """Return whether a function's package is installed. Nothing is imported: only a job's process does that."""
    try:
        return importlib.util.find_spec(function.partition(":")[0].partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def faults_of(data: DataSource) -> list[str]:
    """Return the faults of the data file's header or the schema, one sentence each."""
    try:
        columns_in_use(data)
    except DataError as error:
        return list(error.faults) or [str(error)]
    return []


# --- Templates of policy.toml: every setting with its meaning, most of them commented out ---


#: Column of the comments.
_MARGIN = 32
_Lines = list[tuple[str, str] | str]

_WATCH: _Lines = [
    "",
    "# [watch]",
    ("# metrics_port = 9108", "Prometheus text, on 127.0.0.1 alone"),
]
_HOURS: _Lines = [
    ('# hours = "07:00-19:00"', 'by this machine\'s clock; over midnight: "22:00-06:00"'),
    ("# waiting_worker = false", "keep no process (260 MB) for the next job; the default below 2 GB of memory"),
]


def party_template(*, name: str, home: str, num_parties: int, file: str, id: str, dataset: str) -> str:
    """Return a commented policy.toml for a party."""
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
    """Return a commented policy.toml for the label holder."""
    lines: _Lines = [
        *_head(name, home),
        "[data]",
        (f"file = {_quoted(file)}", ".csv or .parquet"),
        (f"id = {_quoted(id)}", "the column by which rows of different organisations are matched"),
        (f"label = {_quoted(label)}", "the column to learn"),
        ('# dataset = "labels"', "what the ledger counts under; never change it for the same people"),
        ('# version = "2026-01"', "change it when labels changed: they are then drawn, and charged, anew"),
        "",
        "# What all runs together may ever tell about a label. To raise it later: `pbmvfl ledger limit --unit label`.",
        "[[limit]]",
        ("epsilon = 8", "each label is drawn once and kept: a second draw is another version or label epsilon"),
        "delta = 1e-5",
        "",
        "# What plans may show of labels.",
        "[plan]",
        (f"largest_label_epsilon = {USUAL_LABEL_EPSILON:g}", "of one draw"),
        ("# labels_in_clear = true", "permit plans that show every training label to the parties"),
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
    """Quote a text for TOML, which uses JSON's rules."""
    return json.dumps(text)

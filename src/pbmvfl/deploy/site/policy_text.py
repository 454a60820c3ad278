"""Description of a policy for its owner, and a policy.toml to start from."""

from __future__ import annotations

import contextlib
import importlib.util
import json

from jinja2 import Environment, PackageLoader, StrictUndefined

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


# --- A policy.toml to start from ---


def policy_template(*, is_server: bool, name: str, home: str, num_parties: int = 0, **data: str) -> str:
    """Return a commented policy.toml with every setting and its meaning, most of them commented out.

    Args:
        is_server: Whether the organisation is the label holder.
        name: The organisation's name.
        home: Its folder, as it is written on the command line.
        num_parties: Number of parties of the federation; not for the label holder.
        **data: `file` and `id`; also `dataset` at a party, `label` at the label holder.
    """
    templates = Environment(
        loader=PackageLoader("pbmvfl.deploy.site"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["quoted"] = json.dumps  # TOML quotes a text by JSON's rules
    return templates.get_template("policy.toml").render(
        is_server=is_server,
        name=name,
        home=home,
        num_parties=num_parties,
        usual_label_epsilon=f"{USUAL_LABEL_EPSILON:g}",
        **data,
    )

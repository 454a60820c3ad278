"""federation.toml: what is permitted, what is refused and how, and one digest for one meaning."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.deploy.job.job_plans import training_plan
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.errors import FederationError, PlanError
from pbmvfl.plan.plan import Plan
from support.deployments import PARTIES, federation_text

TEXT = federation_text()


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new)


def test_the_file_says_who_is_in_it_and_where_the_server_is() -> None:
    federation = FederationFile.parse(TEXT)
    assert (federation.name, federation.server, federation.lead) == ("people", "clinic", "lead@clinic.example")
    assert (federation.host, federation.port, federation.line_port) == ("127.0.0.1", 8002, 8003)
    assert federation.parties == PARTIES
    assert (federation.patience, dict(federation.plan)) == (120.0, {"epsilon": 8})
    assert [federation.index_of(name) for name in PARTIES] == [0, 1]


def aligned(*kinds: str) -> Any:
    """Public facts of aligned rows, which are all that a plan needs of them."""
    kinds = kinds or ("ccc", "cccc")
    return SimpleNamespace(num_rows=2000, class_names=("no", "yes"), kinds=kinds, widths=tuple(map(len, kinds)))


@pytest.mark.parametrize(
    ("lines", "algorithm"),
    [
        ("epsilon = 8", "staged"),
        ('epsilon = 8\nalgorithm = "staged"', "staged"),
        ('epsilon = 8\nalgorithm = "pbm"', "pbm"),
        ('epsilon = 8\naccounting = "paper"', "pbm"),
    ],
)
def test_the_plan_s_table_names_the_algorithm(lines: str, algorithm: str) -> None:
    federation = FederationFile.parse(changed("epsilon = 8", lines))
    plan = training_plan(federation, aligned())
    assert (plan.algorithm, plan.num_parties, plan.num_samples) == (algorithm, 2, 2000)
    assert plan == Plan.for_budget(
        **federation.plan, num_parties=2, num_samples=2000, num_classes=2, columns=4, evaluation="none"
    )


def test_kinds_of_aligned_columns_give_them_shapes() -> None:
    federation = FederationFile.parse(TEXT)
    assert training_plan(federation, aligned("uuc", "gguc")).shapes == "2u20+1c+p4;2g20+1u20+1c+p4"
    assert training_plan(federation, aligned()).shapes == ""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('epsilon = 8\nkinds = ["uuc", "gguc"]', "the aligned rows give: "),
        ("epsilon = 8\nrows = 5", "unknown plan field 'rows'"),
        ('epsilon = 8\nalgorithm = "both"', "algorithm='both' is not one of pbm, staged"),
        ('epsilon = 8\nalgorithm = "staged"\nbeta = 0.1', "beta=0.1 with algorithm=staged"),
    ],
)
def test_an_algorithm_that_cannot_be_planned_is_refused_in_words(lines: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        training_plan(FederationFile.parse(changed("epsilon = 8", lines)), aligned())
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "people"', 'name = "People"', r"\[federation\] name='People' must be"),
        ('name = "people"', 'name = "people-"', r"\[federation\] name='people-' must be"),
        ('name = "people"', "", r"\[federation\] name=None"),
        ("[federation]", "[federations]", r"\[federations\] is not known; permitted: federation, line"),
        ('name = "clinic"', 'name = "../x"', r"\[server\] name='../x'"),
        ('name = "clinic"', 'name = "server"', r"name='server' is taken by the program"),
        ('name = "clinic"', 'name = "bank"', r"name='bank' stands for two organisations"),
        ('name = "hospital"', 'name = "bank"', r"name='bank' stands for two organisations"),
        ('[[party]]\nname = "hospital"\n', "", r"a \[\[party\]\] for each party, 2 to 200"),
        ('name = "hospital"', 'name = "hospital"\ncolumns = "age"', r"\[\[party\]\] has a name, and nothing else"),
        ('host = "127.0.0.1"', 'host = "a b"', r"\[server\] host='a b'"),
        ('host = "127.0.0.1"', 'host = "x.example."', r"\[server\] host='x.example.'"),
        (
            'host = "127.0.0.1"',
            'host = "2001:db8::1"',
            r"host='2001:db8::1' must be a name or an IPv4 address",
        ),
        ('host = "127.0.0.1"', 'host = "[::1]"', r"give a name that has an IPv4 address"),
        ("port = 8002", "port = 0", r"port=0 must be an integer in 1\.\.65535"),
        ("port = 8002", "port = true", r"port=True must be an integer"),
        ("port = 8002", "port = 8003", r"port=8003 and line_port=8003 must be different"),
        ("line_port = 8003", "", r"line_port=None must be an integer"),
        (
            "line_port = 8003",
            'carrier = "cell"',
            r"\[server\] carrier is no longer a choice: remove it, and give a line",
        ),
        ("lead@clinic.example", "lead", r"\[server\] lead='lead' must be"),
        ("lead@clinic.example", "lead@clinic", r"\[server\] lead='lead@clinic' must be"),
        ("lead@clinic.example", "lead@" + "c" * 60 + ".example", r"\[server\] lead="),
        ("[plan]", "[line]\npatience = 0\n[plan]", r"patience=0 must be a number of seconds in 1\.\.86400"),
        ("[plan]", "[line]\npatient = 9\n[plan]", r"\[line\] patient is not known; permitted: patience"),
        ("[plan]", "[plan", r"is no TOML"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_permitted(old: str, new: str, words: str) -> None:
    with pytest.raises(FederationError, match=words):
        FederationFile.parse(TEXT.replace(old, new, 1))


def test_a_party_that_is_not_in_it_is_named_with_those_that_are() -> None:
    with pytest.raises(FederationError, match=r"party='shop' is not in federation.toml; it names bank, hospital"):
        FederationFile.parse(TEXT).index_of("shop")


def test_a_file_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=re.escape(str(tmp_path)) + r".*write one, or give its path"):
        FederationFile.read(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = 1" * 3, b""])
def test_bytes_that_are_no_federation_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "federation.toml").write_bytes(content)
    with pytest.raises(FederationError, match=r"federation.toml"):
        FederationFile.read(tmp_path)


# --- the digest ---


def test_layout_and_comments_do_not_change_the_digest() -> None:
    other = "# ours\n" + TEXT.replace(" = ", "=").replace("[plan]", "\n\n[plan]  # the budget")
    assert FederationFile.parse(other).digest == FederationFile.parse(TEXT).digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "people"', 'name = "persons"'),
        ("port = 8002", "port = 8004"),
        ("line_port = 8003", "line_port = 8005"),
        ('host = "127.0.0.1"', 'host = "localhost"'),
        ('name = "clinic"', 'name = "clinics"'),
        ("lead@clinic.example", "lead@clinics.example"),
        ("epsilon = 8", "epsilon = 9"),
        ("[plan]", "[line]\npatience = 60\n[plan]"),
        ('name = "bank"\n\n[[party]]\nname = "hospital"', 'name = "hospital"\n\n[[party]]\nname = "bank"'),
    ],
)
def test_every_meaning_has_a_digest_of_its_own(old: str, new: str) -> None:
    other = TEXT.replace(old, new, 1)
    assert other != TEXT
    assert FederationFile.parse(other).digest != FederationFile.parse(TEXT).digest


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name not in ("server", "lead", "all")
)


@given(names=st.lists(NAMES, min_size=3, max_size=8, unique=True), ports=st.tuples(*[st.integers(1, 65535)] * 2))
def test_any_names_and_ports_of_the_form_are_read_back(names: list[str], ports: tuple[int, int]) -> None:
    first, *parties = names
    text = f'[federation]\nname = "x"\n[server]\nname = "{first}"\nhost = "h"\nlead = "l@h.org"\n'
    text += f"port = {ports[0]}\nline_port = {ports[1]}\n" + "".join(f'[[party]]\nname = "{n}"\n' for n in parties)
    if ports[0] == ports[1]:
        with pytest.raises(FederationError, match="must be different"):
            FederationFile.parse(text)
        return
    federation = FederationFile.parse(text)
    assert (federation.server, *federation.parties) == tuple(names)
    assert (federation.port, federation.line_port) == ports


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 99999) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["federation", "server", "party", "plan", "line"]), JSON, max_size=5))
def test_tables_of_any_form_are_refused_and_never_crash(values: dict[str, Any]) -> None:
    """TOML has no null; whatever Python values a parser could hand on are looked at all the same."""
    original = tomllib.loads
    tomllib.loads = lambda _: values  # type: ignore[assignment]
    try:
        with pytest.raises(FederationError):
            FederationFile.parse("")
    finally:
        tomllib.loads = original

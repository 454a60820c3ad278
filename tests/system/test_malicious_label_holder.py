"""A label holder that breaks every rule it can, against one party's job: what does it get that is not charged?

The party is the real one, with its folder, policy, rows and ledger; what asks it is the test. No network, no NVFlare.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("private_set_intersection")

from pbmvfl.deploy.alignment.messages import Begin, Kind, PartyFacts, read_answer
from pbmvfl.deploy.alignment.messages import Question as Asked
from pbmvfl.deploy.alignment.row_ids import IdForm
from pbmvfl.deploy.alignment.runner import LabelRows, Request, align_labels
from pbmvfl.deploy.job.agreement import CHALLENGE_BYTES, Answer, Question, facts
from pbmvfl.deploy.job.party_job import PartySite
from pbmvfl.deploy.job.server_job import ServerSite
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobResult, JobSpec, Work
from pbmvfl.errors import AlignmentError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan
from pbmvfl.wire.messages import SERVER, Message, MessageKind
from pbmvfl.wire.refusals import Refusal
from support.alignment_runs import MemoryLink
from support.federation_texts import federation_text
from support.ledger_books import opening

PARTIES = ("bank", "hospital")
ROWS = 40


def ids_of(name: str) -> list[str]:
    return [f"p{i:03d}" for i in range(ROWS)] + [f"{name}-{i}" for i in range(5)]


def make_homes(folder: Path, *, rules: str = "") -> dict[str, SiteFolder]:
    """Folders of all organisations, without kits."""
    homes, public = {}, {}
    for index, name in enumerate(("clinic", *PARTIES)):
        path = folder / name
        path.mkdir(parents=True)
        (path / "federation.toml").write_text(federation_text(PARTIES, host="127.0.0.1"))
        (path / "organisation.json").write_text(json.dumps({"name": name}))
        homes[name] = SiteFolder.at(path)
        public[name] = homes[name].make_identity().public
        if name == "clinic":
            lines = ["id,label", *(f"{each},{i % 2}" for i, each in enumerate(ids_of(name)))]
            policy = '[data]\nfile = "rows.csv"\nid = "id"\nlabel = "label"\n[plan]\nlabels_in_clear = true\n'
        else:
            lines = ["id,a,b", *(f"{each},{i / 50},{index / 7}" for i, each in enumerate(ids_of(name)))]
            policy = f'[data]\nfile = "rows.csv"\nid = "id"\ndataset = "people"\n[runs]\n{rules}\n'
            policy += "[[limit]]\nepsilon = 1e6\ndelta = 1e-5\n"
        (path / "rows.csv").write_text("\n".join(lines) + "\n")
        (path / "policy.toml").write_text(policy)
        (path / "policy.toml").chmod(0o600)
    for home in homes.values():
        home.write_pins(public["clinic"], {name: public[name] for name in PARTIES})
    return homes


def align(homes: dict[str, SiteFolder], name: str = "people") -> LabelRows:
    """An honest alignment."""
    order = JobSpec(work=Work.ALIGN, federation="people", alignment=name)
    sites = {each: PartySite(homes[each], order) for each in PARTIES}
    link = MemoryLink({each: site.handle for each, site in sites.items()})
    Request.of(homes["clinic"]).write(homes["clinic"].request(name))
    for index in range(len(PARTIES)):
        link.ask({index: setup(homes, order)}, channel=Channel.SETUP)
    try:
        return align_labels(homes["clinic"], name, link, lambda done, total: None)  # noqa: ARG005
    finally:
        for site in sites.values():
            site.close()


def setup(homes: dict[str, SiteFolder], order: JobSpec, **changed: str) -> bytes:
    said = {**facts(homes["clinic"], order, rows=0), **changed}
    return Question(facts=said, challenge=secrets.token_bytes(CHALLENGE_BYTES)).to_bytes()


@pytest.fixture
def homes(tmp_path: Path) -> dict[str, SiteFolder]:
    made = make_homes(tmp_path)
    assert align(made).num_rows == ROWS
    return made


def training(run: str = "run", **choices: Any) -> JobSpec:
    plan = Plan.of(
        **{
            "num_parties": 2,
            "num_samples": ROWS,
            "num_classes": 2,
            "evaluation": "none",
            "batch_size": 10,
            "num_epochs": 2,
            "embedding_dim": 2,
            **choices,
        }
    )
    return JobSpec(
        work=Work.TRAIN, federation="people", alignment="people", run=run, run_id=secrets.token_hex(8), plan=plan
    )


@contextlib.contextmanager
def site_of(home: SiteFolder, order: JobSpec) -> Iterator[PartySite]:
    site = PartySite(home, order)
    try:
        yield site
    finally:
        site.close()


def start(order: JobSpec, run_id: str | None = None) -> bytes:
    assert order.plan is not None
    run = bytes.fromhex(run_id or order.run_id)
    return Message(MessageKind.START, SERVER, run_id=run, payload=order.plan.hash).to_bytes()


def words_of(answer: bytes) -> str:
    """Of a refusal; empty if it is none."""
    message = Message.from_bytes(answer)
    return Refusal.from_payload(message.payload).words if message.kind is MessageKind.REFUSAL else ""


def agree(site: PartySite, homes: dict[str, SiteFolder], order: JobSpec, **changed: str) -> Answer:
    return Answer.from_bytes(site.handle(Channel.SETUP, setup(homes, order, **{"rows": str(ROWS), **changed})))


# --- set-up ---


def test_the_honest_way_works(homes: dict[str, SiteFolder]) -> None:
    """The control of everything that follows."""
    order = training()
    with site_of(homes["bank"], order) as site:
        assert agree(site, homes, order).refused == ""
        assert Message.from_bytes(site.handle(Channel.PROTOCOL, start(order))).kind is MessageKind.HELLO


def test_no_session_is_begun_before_set_up_nor_after_one_that_was_refused(homes: dict[str, SiteFolder]) -> None:
    order = training()
    for changed in ({}, {"plan": "0" * 16}, {"identities": "0" * 16}, {"rows": "39"}, {"federation": "0" * 16}):
        with site_of(homes["bank"], order) as site:
            if changed:
                assert agree(site, homes, order, **changed).refused
            assert "set-up comes first" in words_of(site.handle(Channel.PROTOCOL, start(order)))


def test_a_session_is_for_the_run_of_the_order_and_no_other(homes: dict[str, SiteFolder]) -> None:
    """The book counts sessions by their runs; another number would be counted for nobody."""
    order = training()
    with site_of(homes["bank"], order) as site:
        agree(site, homes, order)
        assert "run" in words_of(site.handle(Channel.PROTOCOL, start(order, "00" * 8)))
        assert Message.from_bytes(site.handle(Channel.PROTOCOL, start(order))).kind is MessageKind.HELLO


def test_a_session_is_for_the_plan_of_the_order_and_no_other(homes: dict[str, SiteFolder]) -> None:
    order, other = training(), training(num_epochs=3)
    assert order.plan is not None
    assert other.plan is not None
    with site_of(homes["bank"], order) as site:
        agree(site, homes, order)
        words = words_of(site.handle(Channel.PROTOCOL, start(other, order.run_id)))
        assert order.plan.hash[:8].hex() in words  # both are named
        assert other.plan.hash[:8].hex() in words


def test_one_job_is_one_session(homes: dict[str, SiteFolder]) -> None:
    """Otherwise the owner's limit on sessions would be one on jobs."""
    order = training()
    with site_of(homes["bank"], order) as site:
        agree(site, homes, order)
        hello = site.handle(Channel.PROTOCOL, start(order))
        assert site.handle(Channel.PROTOCOL, start(order)) == hello  # asked again: the same bytes
        site.handle(Channel.PROTOCOL, b"something else")
        agree(site, homes, order)  # set-up may be asked for again, and makes no new party
        other = Message.from_bytes(start(order))
        again = Message(other.kind, SERVER, run_id=other.run_id, round_number=1, payload=other.payload).to_bytes()
        assert "open already" in words_of(site.handle(Channel.PROTOCOL, again))


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS + 1])
def test_a_plan_for_other_rows_than_the_aligned_ones_is_refused(homes: dict[str, SiteFolder], rows: int) -> None:
    order = training(num_samples=rows, batch_size=min(10, rows))
    with site_of(homes["bank"], order) as site:
        answer = Answer.from_bytes(site.handle(Channel.SETUP, setup(homes, order, rows=str(rows))))
        assert answer.refused
        assert words_of(site.handle(Channel.PROTOCOL, start(order)))


def test_whatever_is_asked_is_answered_and_nothing_is_charged(homes: dict[str, SiteFolder]) -> None:
    random = np.random.default_rng(11)
    order = training()
    with site_of(homes["bank"], order) as site:
        agree(site, homes, order)
        real = [setup(homes, order, rows=str(ROWS)), start(order), b'{"ending": 3}', b"[" * 100_000, b"\xff" * 1000]
        for channel in (Channel.SETUP, Channel.PROTOCOL, Channel.ALIGN):
            for body in real:
                for _ in range(20):
                    changed = bytearray(body[:3000])
                    for place in random.integers(0, len(changed), 3):
                        changed[place] = random.integers(256)
                    assert isinstance(site.handle(channel, bytes(changed)), bytes)
    with contextlib.closing(Ledger(homes["bank"].ledger, read_only=True)) as book:
        assert book.sessions("people") == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"ending": "done", "completed_rounds": 1e400}',
        b'{"ending": "done", "completed_rounds": [1]}',
        b'{"ending": "done", "completed_rounds": "../../x"}',
        b'{"ending": "done", "completed_rounds": 99999999999999999999}',
        b'{"ending": "done", "completed_rounds": -1}',
    ],
)
def test_an_end_that_comes_early_makes_no_model(homes: dict[str, SiteFolder], body: bytes) -> None:
    order = training()
    with site_of(homes["bank"], order) as site:
        agree(site, homes, order)
        answer = site.handle(Channel.END, body)
        assert str(homes["bank"].path) not in answer.decode()
        assert not homes["bank"].model("run").exists()
        assert words_of(site.handle(Channel.PROTOCOL, start(order)))  # it is over


def test_two_jobs_at_the_same_time_do_not_both_charge_one_book(homes: dict[str, SiteFolder]) -> None:
    """The second is told so before anything is released in it; the first goes on."""
    from pbmvfl.errors import LedgerError

    home, order = homes["bank"], training()
    with contextlib.closing(Ledger(home.ledger, owner="bank", durable=True)) as book:
        assert order.plan is not None
        ids = tuple(f"p{i:03d}" for i in range(ROWS))
        asked: dict[str, Any] = {"dataset": "people", "plan": order.plan, "run": "a", "train_ids": ids}
        first = book.open_session(opening(session="1", **asked))
        with (
            contextlib.closing(Ledger(home.ledger, owner="bank", durable=True)) as other,
            pytest.raises(LedgerError, match="another session"),
        ):
            other.open_session(opening(session="2", **asked))
        first.close()


# --- alignment ---


def begin(site: PartySite, homes: dict[str, SiteFolder], order: JobSpec, count: int = 3) -> bytes:
    site.handle(Channel.SETUP, setup(homes, order))
    from pbmvfl.deploy.alignment.messages import OrderKey

    body = Begin(name=order.alignment, count=count, form=IdForm.WORDS, share=OrderKey().share).to_body()
    return site.handle(Channel.ALIGN, Asked(Kind.BEGIN, body=body).to_bytes())


def test_an_alignment_asks_about_as_many_ids_as_it_said_once(homes: dict[str, SiteFolder]) -> None:
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="probe")
    with site_of(homes["bank"], order) as site:
        facts_ = PartyFacts.from_body(read_answer(begin(site, homes, order), "bank"))
        assert facts_.count == ROWS + 5
        site.handle(Channel.SETUP, setup(homes, order))  # makes no second alignment
        with pytest.raises(AlignmentError, match=r"asked before|refused"):
            read_answer(begin(site, homes, order), "bank")
        again = site.handle(Channel.ALIGN, Asked(Kind.SETUP, 0).to_bytes())
        with pytest.raises(AlignmentError, match="is over"):
            read_answer(again, "bank")


@pytest.mark.parametrize("point", [b"\0" * 33, b"\2" + b"\xff" * 32, b"\4" + b"\1" * 32])
def test_points_that_are_none_end_the_alignment_and_not_the_process(homes: dict[str, SiteFolder], point: bytes) -> None:
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="probe")
    with site_of(homes["bank"], order) as site:
        read_answer(begin(site, homes, order), "bank")
        answer = site.handle(Channel.ALIGN, Asked(Kind.REQUEST, 0, 3 * point).to_bytes())
        with pytest.raises(AlignmentError):
            read_answer(answer, "bank")


def test_alignments_are_counted_before_anything_is_told(tmp_path: Path) -> None:
    homes = make_homes(tmp_path, rules="alignments = 2")
    for number in range(4):
        order = JobSpec(work=Work.ALIGN, federation="people", alignment=f"probe-{number}")
        with site_of(homes["bank"], order) as site:
            answer = begin(site, homes, order)
            assert (answer[:1] == b"\0") is (number < 2)


def test_what_fails_at_home_is_told_to_nobody(
    homes: dict[str, SiteFolder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full, a file that was changed: paths and numbers of them are the owner's."""
    from pbmvfl.deploy.alignment import runner

    secret = f"{homes['bank'].path}/alignments has 7 MiB free"

    def fail(*_: object) -> None:
        raise AlignmentError(secret)

    monkeypatch.setattr(runner, "materialise", fail)
    with caplog.at_level(logging.INFO), pytest.raises(AlignmentError) as told:
        align(homes, "second")
    assert "owner's log" in str(told.value)
    assert str(homes["bank"].path) not in str(told.value)


def test_a_cell_that_cannot_be_read_is_quoted_in_no_answer_and_in_no_log(
    homes: dict[str, SiteFolder], caplog: pytest.LogCaptureFixture
) -> None:
    rows = homes["bank"].path / "rows.csv"
    rows.write_text(rows.read_text().replace("0.02,", "secret-cell-4711,"))
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="probe")
    with caplog.at_level(logging.DEBUG), site_of(homes["bank"], order) as site:
        answer = Answer.from_bytes(site.handle(Channel.SETUP, setup(homes, order)))
    assert answer.refused
    assert "secret-cell" not in answer.refused
    assert caplog.records
    assert "secret-cell" not in caplog.text


def test_an_id_that_stands_twice_is_quoted_in_no_answer_and_in_no_log(
    homes: dict[str, SiteFolder], caplog: pytest.LogCaptureFixture
) -> None:
    rows = homes["bank"].path / "rows.csv"
    rows.write_text(rows.read_text().replace("bank-1,", "bank-2,"))
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="probe")
    with caplog.at_level(logging.DEBUG), site_of(homes["bank"], order) as site:
        answer = Answer.from_bytes(site.handle(Channel.SETUP, setup(homes, order)))
    assert answer.refused
    assert "bank-2" not in answer.refused + caplog.text


def test_an_order_with_rows_that_are_not_here_tells_no_number_of_them(homes: dict[str, SiteFolder]) -> None:
    """Each id in it is a guess; how many were right would be an answer to all."""
    from pbmvfl.deploy.alignment.messages import OrderKey

    order = JobSpec(work=Work.ALIGN, federation="people", alignment="probe")
    told = set()
    for wrong in (1, 2, 3):
        with site_of(homes["bank"], order) as site:
            site.handle(Channel.SETUP, setup(homes, order))
            key = OrderKey()
            body = Begin(name="probe", count=9, form=IdForm.WORDS, share=key.share).to_body()
            said = PartyFacts.from_body(
                read_answer(site.handle(Channel.ALIGN, Asked(Kind.BEGIN, body=body).to_bytes()), "bank")
            )
            shared = key.with_share(said.share, label_share=key.share, party_share=said.share, party="bank")
            guesses = [f"p{i:03d}" for i in range(4)] + [f"nobody-{i}" for i in range(wrong)]
            asked = shared.seal(Asked(Kind.ORDER, 0, b"".join(map(shared.tag, guesses))))
            told.add(site.handle(Channel.ALIGN, asked.to_bytes()))
    assert len(told) == 1
    assert told.pop()[:1] == b"\1"


# --- the same rows again ---


def run_job(homes: dict[str, SiteFolder], order: JobSpec, *, cut_after: int | None = None) -> Any:
    """All roles of one job in this process; with `cut_after` the label holder says END after so many rounds."""
    sites = {each: PartySite(homes[each], order) for each in PARTIES}
    link = MemoryLink({each: site.handle for each, site in sites.items()})
    rounds = 0

    def exchange(message: bytes, *, timeout: float | None = None) -> Any:
        nonlocal rounds
        rounds += Message.from_bytes(message).kind is MessageKind.ROUND
        if cut_after is not None and rounds > cut_after:
            end = json.dumps({"ending": "done", "completed_rounds": 10**6}).encode()
            link.ask(dict.fromkeys(range(2), end), channel=Channel.END)
        return link.ask(dict.fromkeys(range(2), message), channel=Channel.PROTOCOL, timeout=timeout)

    link.exchange = exchange  # type: ignore[method-assign]
    try:
        return ServerSite(homes["clinic"], order, link, job=secrets.token_hex(4)).run()
    finally:
        for site in sites.values():
            site.close()


def charged(home: SiteFolder) -> list[tuple[str, int]]:
    """(run, row releases) of every session in the book."""
    with contextlib.closing(Ledger(home.ledger, read_only=True)) as book:
        return [(entry.run, entry.row_releases) for entry in book.sessions("people")]


def test_a_round_that_is_asked_for_in_many_sessions_is_charged_in_each_and_sessions_end(tmp_path: Path) -> None:
    homes = make_homes(tmp_path, rules="sessions = 2")
    align(homes)
    order = training(num_epochs=1)
    endings = [str(run_job(homes, order, cut_after=2).ending) for _ in range(3)]
    assert "done" not in endings
    assert [(run, releases > 0) for run, releases in charged(homes["bank"])] == [(order.run_id, True)] * 2
    with site_of(homes["bank"], order) as site:
        assert "the policy permits 2 sessions" in agree(site, homes, order).refused


def test_an_end_in_the_middle_gives_no_model_that_can_be_asked_for_nothing(homes: dict[str, SiteFolder]) -> None:
    """The part is of a round that was paid for, and whoever asks it pays."""
    from pbmvfl.deploy.job.job_plans import prediction_plan

    order = training()
    assert str(run_job(homes, order, cut_after=6).ending) != "done"
    early = (homes["bank"].model("run") / "part.json").is_file()
    assert early  # of the first epoch's end
    assert str(run_job(homes, order).ending) == "done"
    plan = prediction_plan(homes["clinic"], "run", LabelRows.load(homes["clinic"], "people"))
    asked = JobSpec(
        work=Work.PREDICT, federation="people", alignment="people", run="run", run_id=order.run_id, plan=plan
    )
    before = charged(homes["bank"])
    assert str(run_job(homes, asked).ending) == "done"
    after = charged(homes["bank"])
    assert sum(releases for _, releases in after[len(before) :]) == ROWS  # training rows, each once more
    assert str(run_job(homes, asked).ending) == "done"
    again = charged(homes["bank"])
    assert sum(releases for _, releases in again[len(after) :]) == ROWS  # masked sums are drawn anew, and charged anew


def test_a_partys_columns_that_changed_are_told_when_its_owner_says_so_and_not_before(
    homes: dict[str, SiteFolder],
) -> None:
    """A new table with other columns of the same people, aligned anew: the answers of before, for nothing."""
    from pbmvfl.deploy.job.job_plans import prediction_plan

    order = training(
        training="local",
        labels="parties",
        head="fixed",
        mechanism="none",
        activation="none",
        encoder="linear",
        noise_multiplier=6.0,
        vote="top",
        num_fusion_samples=4,
        prediction_mechanism="krr",
        prediction_symbols=2,
        prediction_response_epsilon=2.0,
    )
    assert str(run_job(homes, order).ending) == "done"

    def ask(alignment: str) -> list[int]:
        """The rows that each party's ledger was charged for."""
        plan = prediction_plan(homes["clinic"], "run", LabelRows.load(homes["clinic"], alignment))
        asked = JobSpec(
            work=Work.PREDICT, federation="people", alignment=alignment, run="run", run_id=order.run_id, plan=plan
        )
        before = [charged(homes[party]) for party in PARTIES]
        ended = run_job(homes, asked)
        assert str(ended.ending) == "done", ended.words
        after = [charged(homes[party]) for party in PARTIES]
        pairs = zip(after, before, strict=True)
        return [sum(releases for _, releases in now[len(then) :]) for now, then in pairs]

    assert ask("people") == [ROWS - 4, ROWS - 4]  # fusion rows were answered in training, by the same law
    rows = homes["bank"].path / "rows.csv"
    header, *lines = rows.read_text().splitlines()
    rows.write_text("\n".join([header, *(f"{line.split(',')[0]},-7,9" for line in lines)]) + "\n")
    align(homes, "later")
    assert ask("later") == [0, 0]
    policy = homes["bank"].policy
    policy.write_text(policy.read_text().replace('dataset = "people"\n', 'dataset = "people"\nversion = "2026-02"\n'))
    assert ask("later") == [ROWS, 0]
    assert ask("people") == [0, 0]  # all of its people were asked about in this version


# --- a party that would harm the label holder ---


def test_a_partys_last_words_do_nothing_to_the_label_holders_terminal(homes: dict[str, SiteFolder]) -> None:
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="second")
    sites = {each: PartySite(homes[each], order) for each in PARTIES}
    for evil in (json.dumps({"kept": False, "words": "\x1b[2J\x1b]0;owned\x07\nall is well"}), "[" * 200_000, "3"):
        link = MemoryLink({each: site.handle for each, site in sites.items()})
        Request.of(homes["clinic"]).write(homes["clinic"].request("second"))

        def ask(questions: Any, *, channel: Channel, timeout: Any = None, evil: str = evil, link: Any = link) -> Any:
            answers = MemoryLink.ask(link, questions, channel=channel, timeout=timeout)
            if channel is Channel.END:
                answers.received[0] = evil.encode()  # type: ignore[index]
            return answers

        link.ask = ask  # type: ignore[method-assign]
        outcome = ServerSite(homes["clinic"], order, link, job="j").run()
        assert outcome.words.isprintable(), outcome
        assert str(outcome.ending) == "failed"
        sites = {each: PartySite(homes[each], order) for each in PARTIES}
    for site in sites.values():
        site.close()


def test_what_a_site_says_about_a_job_does_nothing_to_the_leads_terminal(homes: dict[str, SiteFolder]) -> None:
    from pbmvfl.deploy.nvflare.supervisor import Supervisor, Watched

    order, home = training(), homes["clinic"]
    watched = Watched(folder=home.run("run"), progress=lambda: 0)
    detail = [
        "server: OK",
        "bank: NVFLARE_ERROR: \x1b[2J\nhospital: OK \x1b]0;owned\x07" + 10_000 * "x",
        "hospital: OK",
    ]

    class Told(Supervisor):
        """The lead, whose question about a job is answered with this."""

        def _call(self, _: Any) -> Any:
            return {"job_deploy_detail": detail}

        def result_of(self, job: str, status: str) -> JobResult:
            return self._unwritten_result(job, status)

    supervisor = Told(home, order, watched, token="t", say=lambda _: None)
    outcome = supervisor.result_of("job", "FINISHED:FAILED_TO_RUN")
    assert outcome.words.startswith("bank: ")
    assert outcome.words.isprintable()
    assert len(outcome.words) < 700


def test_threads_that_ask_at_the_same_time_get_one_alignment(homes: dict[str, SiteFolder]) -> None:
    """The link is one thread's; should it ever be two, nothing is counted or begun twice."""
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="probe")
    with site_of(homes["bank"], order) as site:
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: answers.append(site.handle(Channel.SETUP, setup(homes, order))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 4
    made = json.loads((homes["bank"].path / "alignments.json").read_text())["made"]
    assert made == 2  # the fixture's, and this one

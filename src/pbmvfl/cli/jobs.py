"""Jobs of the label holder: `align`, `submit`, `resume`, and `predict` and `evaluate` with --home."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl.cli.options import AsJson
from pbmvfl.errors import FederationError

if TYPE_CHECKING:
    from rich.console import Console

    from pbmvfl.deploy.alignment.runner import LabelRows
    from pbmvfl.deploy.site.folder import SiteFolder
    from pbmvfl.deploy.site.job_spec import JobResult, JobSpec
    from pbmvfl.plan.plan import Plan

#: Exit codes: a party's limit ended the job; the job was lost and can be resumed.
STOPPED, FAILED = 3, 5
ORDER = "order.json"

HomeOption = Annotated[Path, typer.Option("--home", help="The label holder's folder.", show_default=True)]
KeepGoing = Annotated[
    bool,
    typer.Option(
        "--keep-going/--once", help="Follow a job that was lost with another, from the newest common checkpoint."
    ),
]


def align(
    name: Annotated[str, typer.Argument(help="What the common rows are called from then on.")] = "people",
    home: HomeOption = Path("."),
    ids: Annotated[
        Path | None,
        typer.Option(
            help="File with the label holder's rows. Default: [data] file of policy.toml.", show_default=False
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Align a name again, if no run has released anything of its rows.")
    ] = False,
    keep_going: KeepGoing = True,
    json_: AsJson = False,
) -> None:
    """Find the rows that the label holder and every party have, and put them in one order, without sending an id.

    [bold]Try[/]  pbmvfl align people --home clinic

    Afterwards every site has its own rows in that order. The label holder learns which of its ids each party has, and
    how many rows it has; a party learns how many ids the label holder asked for, and which of its own rows are common.
    """
    from pbmvfl.deploy.alignment.runner import LabelRows, Request
    from pbmvfl.deploy.job.admission import free_alignment
    from pbmvfl.deploy.site.job_spec import JobSpec, Work, forget

    place = _server_home(home)
    folder = place.request(name)
    if place.alignment(name).exists() and not replace:
        raise FederationError(
            f"alignment={name!r} is there already; align under another name: `pbmvfl align "
            f"{free_alignment(place, name)}`, or use --replace if no run has released anything of its rows"
        )
    Request.of(place, ids).write(folder)
    forget(folder)
    order = JobSpec(work=Work.ALIGN, federation=place.federation.name, alignment=name)
    shown = _Shown(place, json_only=json_)
    shown.say(f"aligning {name} with {', '.join(place.federation.parties)}")
    outcome = shown.supervise(order, folder, token=f"align-{name}-{secrets.token_hex(4)}", keep_going=keep_going)
    if outcome.ending == "done":
        rows = LabelRows.load(place, name)
        shown.result(
            {
                "alignment": name,
                "rows": rows.num_rows,
                "parties": dict(zip(place.federation.parties, rows.widths, strict=True)),
            }
        )
        shown.say(f"{rows.num_rows:,} rows in common, in one order at every site: alignments/{name}")
    shown.end(outcome, again=f"pbmvfl align {name} --home {home} --replace")


def submit(
    run: Annotated[str | None, typer.Argument(help="The run's name. Default: the next free run-NNN.")] = None,
    home: HomeOption = Path("."),
    alignment: Annotated[str, typer.Option(help="The aligned rows to train on.")] = "people",
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan as JSON. Default: within the budget of federation.toml.", show_default=False),
    ] = None,
    keep_going: KeepGoing = False,
    json_: AsJson = False,
) -> None:
    """Train: print what it will cost, submit, and wait for the end.

    [bold]Try[/]  pbmvfl submit --home clinic --keep-going

    Every party checks the plan by its own policy and its own ledger before any process of the job exists. With
    --keep-going a job that is lost with a process is followed by another; what is released twice is charged twice.
    """
    from pbmvfl.deploy.alignment.runner import LabelRows
    from pbmvfl.deploy.job.job_plans import read_plan, training_plan
    from pbmvfl.deploy.site.job_spec import JobSpec, Work

    place = _server_home(home)
    rows = LabelRows.load(place, alignment)
    name = run or _free_run(place)
    folder = place.run(name)
    if (folder / ORDER).exists():
        raise FederationError(f"run={name!r} exists already; go on with it: `pbmvfl resume {name} --home {home}`")
    chosen = training_plan(place.federation, rows) if plan is None else read_plan(plan, place.federation, rows)
    order = JobSpec(
        work=Work.TRAIN,
        federation=place.federation.name,
        alignment=alignment,
        run=name,
        run_id=secrets.token_hex(8),
        plan=chosen,
    )
    shown = _Shown(place, json_only=json_)
    shown.plan(chosen, rows, name)
    _check_labels(place, chosen, rows)
    _write_order(folder, order)
    _train(shown, order, folder, home, keep_going)


def resume(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    home: HomeOption = Path("."),
    keep_going: KeepGoing = False,
    json_: AsJson = False,
) -> None:
    """Go on with a run from the newest checkpoint that the label holder and every party have.

    [bold]Try[/]  pbmvfl resume run-001 --home clinic --keep-going
    """
    from pbmvfl.deploy.site.job_spec import JobSpec

    place = _server_home(home)
    folder = place.run(run)
    path = folder / ORDER
    if not path.is_file():
        known = sorted(each.parent.name for each in (place.path / "runs").glob(f"*/{ORDER}"))
        raise FederationError(f"run={run!r} is not known here; there are: {', '.join(known) or 'none'}")
    shown = _Shown(place, json_only=json_)
    _train(shown, JobSpec.from_text(path.read_text()), folder, home, keep_going)


def ask(
    run: str,
    *,
    home: Path,
    rows: str,
    budget: dict[str, Any],
    out: Path | None,
    with_labels: bool,
    json_only: bool,
) -> None:
    """Predict or evaluate every aligned row in a federation, as one charged release."""
    from pbmvfl.deploy.alignment.runner import LabelRows
    from pbmvfl.deploy.job.job_plans import prediction_plan
    from pbmvfl.deploy.site.job_spec import JobSpec, Work, forget
    from pbmvfl.federation.predictions import check_predictions_file

    place = _server_home(home)
    if out is not None:
        check_predictions_file(out)
    aligned = LabelRows.load(place, rows)
    if with_labels and not aligned.has_labels:
        raise FederationError(f"rows={rows!r} have no labels to compare with; use `pbmvfl predict`")
    trained = JobSpec.from_text((place.run(run) / ORDER).read_text())
    plan = prediction_plan(place, run, aligned, **budget)
    order = JobSpec(
        work=Work.PREDICT,
        federation=place.federation.name,
        alignment=rows,
        run=run,
        run_id=trained.run_id,
        plan=plan,
    )
    shown = _Shown(place, json_only=json_only)
    shown.prediction(plan, aligned, run, rows)
    folder = place.run(run) / f"asked-{rows}"
    forget(folder)
    outcome = shown.supervise(order, folder, token=f"ask-{trained.run_id}-{secrets.token_hex(4)}", keep_going=False)
    if outcome.ending in ("done", "stopped"):
        shown.predictions(folder, out, with_labels=with_labels)
    shown.end(outcome, again=f"pbmvfl predict {run} --home {home} --rows {rows}")


# --- Internal helpers ---


def _server_home(path: Path) -> SiteFolder:
    from pbmvfl.deploy.site.folder import SiteFolder

    home = SiteFolder.at(path)
    if not home.is_server:
        raise FederationError(
            f"home={str(path)!r} is {home.name}'s, a party's; the label holder ({home.federation.server}) asks for this"
        )
    return home


def _check_labels(home: SiteFolder, plan: Plan, rows: LabelRows) -> None:
    """Refuse what the label holder's own policy, ledger or store of drawn labels would refuse, with the reason."""
    from pbmvfl.deploy.job.server_job import label_holder_at
    from pbmvfl.deploy.site.policy_file import PolicyFile, own_ledger
    from pbmvfl.ledger.ledger_folder import check_reaches_end

    policy = PolicyFile.read(home)
    policy.policy().check(plan)
    if plan.label_response is None:
        return
    with own_ledger(home, policy):
        pass  # limits of the policy hold from here on
    ahead = label_holder_at(home, rows).forecast(plan.label_response, rows.num_rows)
    check_reaches_end([ahead], dataset=policy.dataset, rounds=len(plan.schedule))


def _free_run(home: SiteFolder) -> str:
    for number in range(1, 100_000):
        name = f"run-{number:03d}"
        if not home.run(name).exists():
            return name
    raise FederationError("run-NNN are all taken; give a name")


def _write_order(folder: Path, order: JobSpec) -> None:
    from pbmvfl._files import PRIVATE_FILE, make_private_folder, write_atomically

    make_private_folder(folder)
    assert order.plan is not None
    write_atomically(folder / "plan.json", order.plan.to_json(), mode=PRIVATE_FILE)
    write_atomically(folder / ORDER, order.to_text(), mode=PRIVATE_FILE)


def _train(shown: _Shown, order: JobSpec, folder: Path, home: Path, keep_going: bool) -> None:
    from pbmvfl.deploy.site.job_spec import final_result

    done = final_result(folder)
    if done is not None and done.ending == "done":
        shown.say(f"{order.run} is finished already; this is its result.")
    else:
        token = f"train-{order.run_id}-{secrets.token_hex(4)}"
        done = shown.supervise(order, folder, token=token, keep_going=keep_going)
    if done.ending in ("done", "stopped"):
        shown.trained(folder)
    shown.end(done, again=f"pbmvfl resume {order.run} --home {home} --keep-going")


class _Shown:
    """Terminal or JSON output for the label holder's operator."""

    def __init__(self, home: SiteFolder, *, json_only: bool) -> None:
        from rich.console import Console

        self._home, self._json_only = home, json_only
        self._console: Console = Console(stderr=json_only, quiet=json_only, highlight=False)
        self._said: dict[str, Any] = {}

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def result(self, values: dict[str, Any]) -> None:
        self._said |= values

    def supervise(self, order: JobSpec, folder: Path, *, token: str, keep_going: bool) -> JobResult:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from pbmvfl.deploy.monitoring.status import read_status
        from pbmvfl.deploy.nvflare.supervisor import Supervisor, Watched

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=18),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal or self._json_only,
            transient=True,
        )
        task = bar.add_task("submitted", total=None, shown="")

        def reached() -> int:
            status = read_status(self._home.status)
            return 0 if status is None or status.run != order.run else status.round

        def look() -> None:
            status = read_status(self._home.status)
            if status is None:
                return
            total = status.rounds_total or None
            counts = f"{status.round}/{total}" if total else ""
            alive = f"{len(status.parties_alive)} of {len(self._home.federation.parties)} parties"
            bar.update(task, description=status.state, completed=status.round, total=total, shown=f"{counts}  {alive}")

        watched = Watched(folder=folder, progress=reached)
        with bar:
            supervisor = Supervisor(self._home, order, watched, token=token, say=self.say, look=look)
            return supervisor.run(keep_going=keep_going)

    # --- Before a job ---

    def plan(self, plan: Plan, rows: LabelRows, run: str) -> None:
        from rich.markup import escape
        from rich.table import Table

        from pbmvfl.cli.descriptions import describe_plan
        from pbmvfl.cli.tables import print_notes, print_privacy_of_rows
        from pbmvfl.federation.metrics_summary import learning_notes
        from pbmvfl.privacy.conversion import usual_delta

        table = Table(show_header=False, box=None, padding=(0, 2))
        table.add_row("federation", escape(self._home.federation.name))
        widths = zip(self._home.federation.parties, rows.widths, strict=True)
        table.add_row("parties", escape(", ".join(f"{name} ({width} columns)" for name, width in widths)))
        table.add_row("rows", f"{rows.num_rows:,}, classes {escape(', '.join(rows.class_names))}")
        for title, words in describe_plan(plan):
            table.add_row(title, escape(words))
        table.add_row("run", escape(run))
        self._console.print(table)
        delta = usual_delta(plan.num_samples)
        print_privacy_of_rows(self._console, plan.training_run(), delta=delta, title="epsilon that this will cost")
        print_notes(self._console, learning_notes(plan, columns=max(rows.widths)))
        if plan.sends_labels and plan.label_epsilon is None:
            print_notes(
                self._console,
                ["the labels of the training rows go to every party; they are not protected by any epsilon"],
            )

    def prediction(self, plan: Plan, rows: LabelRows, run: str, name: str) -> None:
        from pbmvfl.cli.tables import print_privacy
        from pbmvfl.plan.round_kinds import Split
        from pbmvfl.privacy.conversion import usual_delta
        from pbmvfl.privacy.table import privacy_table

        law = (plan.prediction or plan.release).describe()
        self.say(f"{rows.num_rows:,} rows of {name}, asked of {run}: {law}")
        table = privacy_table(plan.training_run().of_split(Split.TEST), delta=usual_delta(plan.num_samples))
        print_privacy(self._console, table, title="epsilon that a row's prediction costs", strict_only=True)

    # --- After a job ---

    def trained(self, folder: Path) -> None:
        from pbmvfl.cli.descriptions import print_result
        from pbmvfl.federation.results import Result
        from pbmvfl.privacy.conversion import usual_delta

        result = Result.read(folder / "result.json")
        delta = usual_delta(result.plan.num_samples)
        print_result(self._console, result, delta=delta, is_news=False)
        self.say(f"the label holder's part of the model is in models/{folder.name}, each party's at home")
        self._said |= {"run": folder.name, "result": json.loads(result.to_json(delta=delta))}

    def predictions(self, folder: Path, out: Path | None, *, with_labels: bool) -> None:
        import shutil

        found = json.loads((folder / "summary.json").read_text())
        file = folder / "predictions.parquet"
        if out is not None:
            shutil.copyfile(file, out)
            file = out
        self.say(f"{found['predicted']:,} of {found['rows']:,} rows predicted; predictions are in {file}")
        metrics = found.get("metrics") if with_labels else None
        if metrics:
            shown = ", ".join(f"{name.replace('test_', '')} {value:.4f}" for name, value in metrics.items())
            self.say(f"{shown} (released predictions; most frequent class: {found['majority_rate']:.4f})")
        self._said |= {**found, "out": str(file)}

    def end(self, outcome: JobResult, *, again: str) -> None:
        if self._json_only:
            print(json.dumps({**self._said, "ending": str(outcome.ending), "words": outcome.words}, indent=2))
        if outcome.ending == "done":
            return
        if outcome.ending == "refused":
            raise FederationError(outcome.words)
        if not self._json_only:
            self.say(f"{outcome.ending}: {outcome.words}")
        if outcome.ending == "stopped":
            raise SystemExit(STOPPED)
        self.say(f"nothing is lost; go on with: {again}")
        raise SystemExit(FAILED)

"""Studies on a GPU, several configurations at once, on a machine with torch, numpy and pillow alone:

    PYTHONPATH=src python3 -m pbmvfl.simulation.cuda --config reproduce/table1.json --data DIR --out DIR \\
        --limit-epochs 100

Writes one JSON a run under OUT/records, as `pbmvfl reproduce --out OUT` expects them, and the log of seconds an epoch.
Runs that are there already are not run again. With --measure it times one configuration, eight at once, the plain loop
in the authors' style and the matrix work alone, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.encoders import build_encoder, build_head
from pbmvfl.plan import Plan
from pbmvfl.simulation.graphed import Execution, GraphedSimulation, evaluate_together, take_turns

if TYPE_CHECKING:
    from pbmvfl.reproduction.runner import OnProgress, Run, StudyRunner

#: Configurations at once. Beyond eight the device is full.
TOGETHER = 8
#: Epochs between two writings of an unfinished run, so that a run cut short leaves its curve.
_WRITE_EVERY = 5

Log = Callable[[str], None]


def set_up() -> None:
    """Fast products; convolutions tuned once, because every batch has the same shape."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True


def _silent(text: str) -> None:
    del text


class _Active:
    """A run on the device."""

    def __init__(self, run: Run, simulation: GraphedSimulation) -> None:
        self.run, self.simulation = run, simulation
        self.seconds = 0.0


def run_together(
    runner: StudyRunner,
    missing: Sequence[Run],
    *,
    on_progress: OnProgress | None = None,
    execution: Execution | None = None,
    together: int = TOGETHER,
    checkpoints: Path | None = None,
    log: Log | None = None,
) -> None:
    """All missing runs of a study, `together` at a time; the seeds of a configuration start and stop together."""
    how = execution or Execution.on(runner.device)
    if how.device.type == "cuda":
        set_up()
    say = log or _silent
    queue = list(dict.fromkeys(run.cell for run in missing))
    active: list[_Active] = []
    while queue or active:
        while queue:
            seeds = [run for run in missing if run.cell == queue[0]]
            if active and len(active) + len(seeds) > together:
                break
            active += [_Active(run, _open(runner, run, how, checkpoints, say)) for run in seeds]
            del queue[0]
        started = time.perf_counter()
        take_turns([each.simulation for each in active])
        if how.device.type == "cuda":
            torch.cuda.synchronize(how.device)
        trained = time.perf_counter() - started
        lines = evaluate_together([each.simulation for each in active])
        whole = time.perf_counter() - started
        for each, line in zip(active, lines, strict=True):
            each.seconds += whole / len(active)
            if on_progress is not None:
                on_progress(each.run, line["epoch"], line)
            accuracy, loss = line["train_accuracy"], line["train_loss"]
            say(f"{each.run.label} epoch {line['epoch']} train accuracy {accuracy:.4f} loss {loss:.4f}")
        count = len(active)
        say(f"{count} at once: {trained / count:.3f} s an epoch each to train, {whole / count:.3f} in all")
        active = _keep_unfinished(runner, active, how, checkpoints, on_progress)


def _open(runner: StudyRunner, run: Run, how: Execution, checkpoints: Path | None, say: Log) -> GraphedSimulation:
    data = runner.data(run.cell.num_parties)
    simulation = GraphedSimulation(run.plan, data, execution=how, augment=runner.study.augment)
    started = time.perf_counter()
    simulation.prepare()
    say(f"{run.label}: ready after {time.perf_counter() - started:.1f} s")
    if checkpoints is not None and (path := _checkpoint(checkpoints, run)).is_file():
        earlier = runner.records.read(runner.study.dataset, run.cell.name, run.seed)
        simulation.load(path)
        if earlier is not None and len(earlier.history) >= simulation.completed_epochs:
            simulation.history = earlier.history[: simulation.completed_epochs]
            say(f"{run.label}: continues after epoch {simulation.completed_epochs}")
        else:  # weights without their curve are of no use
            simulation = GraphedSimulation(run.plan, data, execution=how, augment=runner.study.augment)
            simulation.prepare()
    return simulation


def _checkpoint(folder: Path, run: Run) -> Path:
    return folder / f"{run.cell.name}-seed{run.seed}.npz"


def _keep_unfinished(
    runner: StudyRunner, active: list[_Active], how: Execution, checkpoints: Path | None, on_progress: OnProgress | None
) -> list[_Active]:
    """Write what is due, and drop configurations all of whose seeds are done."""
    kept: list[_Active] = []
    for cell in dict.fromkeys(each.run.cell for each in active):
        same = [each for each in active if each.run.cell == cell]
        done = runner.is_done([each.simulation.history for each in same])
        epoch = same[0].simulation.completed_epochs
        if done or epoch % _WRITE_EVERY == 0:
            name = torch.cuda.get_device_name(how.device) if how.device.type == "cuda" else "cpu"
            number = "bf16" if how.bf16 else "float32"
            for each in same:
                engine = f"captured rounds, {name}, {number}, torch {torch.__version__}"
                runner.save(each.run, each.simulation.history, seconds=each.seconds, engine=engine)
                if checkpoints is not None:
                    checkpoints.mkdir(parents=True, exist_ok=True)
                    each.simulation.save(_checkpoint(checkpoints, each.run))
        if not done:
            kept += same
        elif on_progress is not None:
            for each in same:
                on_progress(each.run, epoch, None)
    return kept


# --- measuring ---


def eager_seconds(plan: Plan, data: VerticalDataset, *, device: torch.device, rounds: int) -> float:
    """Seconds a round of a plain loop in the authors' style: party after party, float32, every network twice."""
    parts = [torch.from_numpy(part[: plan.batch_size]).to(device) for part in data.train_features]
    labels = torch.from_numpy(data.train_labels[: plan.batch_size]).to(device)
    encoders = [
        build_encoder(plan, index=m, input_shape=part.shape[1:]).to(device)
        for m, part in enumerate(data.train_features)
    ]
    head = build_head(plan).to(device)
    optimizers = [torch.optim.SGD(network.parameters(), lr=plan.learning_rate) for network in (*encoders, head)]

    def step() -> None:
        total = torch.zeros(len(labels), plan.embedding_dim, device=device)
        for encoder, part in zip(encoders, parts, strict=True):
            with torch.no_grad():
                probability = 0.5 + plan.beta * encoder(part) / plan.bound
                total += torch.binomial(torch.full_like(probability, plan.num_trials), probability)
        estimate = (total - plan.num_trials * plan.num_parties / 2) * plan.bound / (plan.beta * plan.num_trials)
        estimate.requires_grad_()
        loss = functional.cross_entropy(head(estimate), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for encoder, part in zip(encoders, parts, strict=True):
            encoder(part).backward(estimate.grad)
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(3 if rounds > 3 else 1):
        step()
    _wait(device)
    started = time.perf_counter()
    for _ in range(rounds):
        step()
    _wait(device)
    return (time.perf_counter() - started) / rounds


def matrix_seconds(plan: Plan, data: VerticalDataset, *, device: torch.device, size: int = 8192) -> float:
    """Seconds a round if only its products ran, at the speed of one large bf16 product measured here."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        for m, part in enumerate(data.train_features):
            network: nn.Module = build_encoder(plan, index=m, input_shape=part.shape[1:])
            rows = torch.from_numpy(part[:2])
            torch.autograd.backward(network(rows).sum())
    flops = counter.get_total_flops() / 2 * plan.batch_size
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    a @ a
    _wait(device)
    started = time.perf_counter()
    for _ in range(10):
        a @ a
    _wait(device)
    rate = 10 * 2 * size**3 / (time.perf_counter() - started)
    return float(flops / rate)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(runner: StudyRunner, *, execution: Execution, together: int, epochs: int, log: Log) -> dict[str, float]:
    """Seconds an epoch: one configuration, several at once, the eager loop, and the matrix work alone."""
    device = execution.device
    run = next(run for run in runner.runs() if run.cell.mechanism == "pbm" and run.plan.num_trials == 16)
    data = runner.data(run.cell.num_parties)
    rounds = run.plan.rounds_per_epoch
    found = {
        "eager": eager_seconds(run.plan, data, device=device, rounds=20 if device.type == "cuda" else 1) * rounds,
        "floor": matrix_seconds(run.plan, data, device=device, size=8192 if device.type == "cuda" else 256) * rounds,
    }
    if device.type == "cuda":
        set_up()  # after the eager loop, which is timed with torch's own defaults
    log(f"eager loop {found['eager']:.2f} s an epoch; matrix work alone {found['floor']:.3f} s an epoch")
    for count in (1, together):
        plans = [run.plan.replace(seed=seed) for seed in range(count)]
        several = [GraphedSimulation(p, data, execution=execution, augment=runner.study.augment) for p in plans]
        for simulation in several:
            simulation.prepare()
        take_turns(several)
        _wait(device)
        started = time.perf_counter()
        for _ in range(epochs):
            take_turns(several)
        _wait(device)
        found[f"{count}_at_once"] = (time.perf_counter() - started) / epochs / count
        started = time.perf_counter()
        evaluate_together(several)
        found[f"evaluation_of_{count}"] = (time.perf_counter() - started) / count
        log(
            f"{count} at once: {found[f'{count}_at_once']:.3f} s an epoch each to train, "
            f"{found[f'evaluation_of_{count}']:.3f} to evaluate"
        )
        del several
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    from pbmvfl.reproduction.runner import StudyRunner
    from pbmvfl.reproduction.studies import read_study

    parser = argparse.ArgumentParser(description="Run a study on a GPU, several configurations at once.")
    parser.add_argument("--config", type=Path, required=True, action="append", help="reproduce/NAME.json; may repeat")
    parser.add_argument("--data", type=Path, default=None, help="folder with cifar10/, modelnet10/, ...")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-epochs", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--together", type=int, default=TOGETHER)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checkpoints", type=Path, default=None, help="keep weights here and continue from them")
    parser.add_argument("--quick", action="store_true", help="few rows and epochs")
    parser.add_argument("--measure", action="store_true", help="only time it")
    parser.add_argument("--only", default="", help="configurations whose name contains one of these, with commas")
    for name in ("bf16", "compiled", "graphs", "party-streams"):
        parser.add_argument(f"--no-{name}", action="store_true")
    given = parser.parse_args(arguments)
    switches = ("bf16", "compiled", "graphs", "party_streams")
    how = Execution.on(given.device, **{name: not getattr(given, f"no_{name}") for name in switches})
    given.out.mkdir(parents=True, exist_ok=True)
    with open(given.out / "gpu.log", "a") as file:

        def log(text: str) -> None:
            line = f"{time.strftime('%H:%M:%S')} {text}"
            print(line, flush=True)
            print(line, file=file, flush=True)

        log(f"torch {torch.__version__}, {how}")
        for config in given.config:
            study = read_study(config)
            runner = StudyRunner(
                study.quickened() if given.quick else study,
                out=given.out,
                seeds=given.seeds,
                device=given.device,
                data_folder=given.data,
                limit_epochs=given.limit_epochs,
            )
            if given.measure:
                found = measure(runner, execution=how, together=given.together, epochs=3, log=log)
                (given.out / f"speed-{study.name}.json").write_text(json.dumps(found, indent=1) + "\n")
                continue
            wanted = given.only.split(",")
            missing = [run for run in runner.missing() if any(part in run.cell.name for part in wanted)]
            log(f"{study.name}: {len(missing)} runs to go")
            run_together(
                runner, missing, execution=how, together=given.together, checkpoints=given.checkpoints, log=log
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

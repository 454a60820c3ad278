"""Studies on a GPU, several configurations at once, on a machine with torch, numpy and pillow alone.

    PYTHONPATH=src python3 -m pbmvfl.research.reproduction.cuda --study table1 --limit-epochs 100 --data DIR --out DIR

Writes one line per run under OUT/records, as `pbmvfl reproduce --out OUT` expects them, and a log of seconds per epoch.
Existing runs are not run again. With --measure it times one configuration, eight at once, the plain loop in the
authors' style and the matrix work alone, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.research.reproduction.records import SCREEN_MARGIN
from pbmvfl.research.reproduction.studies import read_study
from pbmvfl.research.reproduction.study_runner import OnProgress, Run, StudyRunner
from pbmvfl.research.simulation.graphed import Execution, GraphedSimulation, evaluate_together, take_turns
from pbmvfl.training.encoders import build_encoder, build_head

#: Configurations at once. Beyond eight the device is full.
TOGETHER = 8
#: Epochs between two writings of an unfinished run, so that a run cut short leaves its curve.
_WRITE_EVERY = 5

Log = Callable[[str], None]


def set_up() -> None:
    """Choose fast products, and tune convolutions once, because every batch has the same shape."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True


def _silent(text: str) -> None:
    del text


class _Job:
    """All seeds of one configuration, and the studies that want it."""

    def __init__(self, runner: StudyRunner, runs: list[Run]) -> None:
        self.runner, self.runs = runner, runs
        self.wanted_by = [runner]
        self.simulations: list[GraphedSimulation] = []
        self.seconds = [0.0] * len(runs)

    @property
    def is_done(self) -> bool:
        histories = [simulation.history for simulation in self.simulations]
        return all(runner.is_done([*histories, *runner.others(self.runs)]) for runner in self.wanted_by)

    @property
    def epoch(self) -> int:
        return self.simulations[0].completed_epochs


def _jobs(wanted: Sequence[tuple[StudyRunner, Sequence[Run]]]) -> list[_Job]:
    """Return the missing runs, every configuration once: a run for two studies continues until both have enough."""
    found: dict[tuple[str, str], _Job] = {}
    for runner, missing in wanted:
        for cell in dict.fromkeys(run.cell for run in missing):
            key = (runner.study.dataset, cell.name)
            if key in found:
                found[key].wanted_by.append(runner)
            else:
                found[key] = _Job(runner, [run for run in missing if run.cell == cell])
    return list(found.values())


def _screen(jobs: Sequence[_Job]) -> float:
    """Return the training accuracy from which on all rows are measured."""
    targets = [runner.study.target for job in jobs for runner in job.wanted_by]
    values = [value for metric, value in filter(None, targets) if metric == "train_accuracy"]
    return min(values, default=math.inf) - SCREEN_MARGIN


def run_together(
    wanted: Sequence[tuple[StudyRunner, Sequence[Run]]],
    *,
    on_progress: OnProgress | None = None,
    execution: Execution | None = None,
    together: int = TOGETHER,
    checkpoints: Path | None = None,
    log: Log | None = None,
) -> None:
    """Run what is missing of one study or several, `together` at a time.

    Seeds of a configuration start and stop together.
    """
    queue = _jobs(wanted)
    if not queue:
        return
    how = execution or Execution.on(queue[0].runner.device)
    if how.device.type == "cuda":
        set_up()
    say = log or _silent
    active: list[_Job] = []
    while queue or active:
        while queue and not (active and sum(len(job.runs) for job in (*active, queue[0])) > together):
            job = queue.pop(0)
            _open(job, how, checkpoints, say)
            active.append(job)
        simulations = [simulation for job in active for simulation in job.simulations]
        count = len(simulations)
        started = time.perf_counter()
        take_turns(simulations)
        _wait(how.device)
        trained = time.perf_counter() - started
        lines = iter(evaluate_together(simulations, screen=_screen(active)))
        whole = time.perf_counter() - started
        for job in active:
            for index, run in enumerate(job.runs):
                line = next(lines)
                for runner in job.wanted_by:
                    runner.check_line(line)
                job.seconds[index] += whole / count
                if on_progress is not None:
                    on_progress(run, line["epoch"], line)
                shown = (name for name in ("train_loss", "train_accuracy", "test_accuracy") if name in line)
                values = (f"{name.replace('_', ' ')} {line[name]:.4f}" for name in shown)
                say(f"{run.label} epoch {line['epoch']} {' '.join(values)}")
        say(f"{count} at once: {trained / count:.3f} s an epoch each to train, {whole / count:.3f} in all")
        for job in active:
            if job.is_done or job.epoch % _WRITE_EVERY == 0:
                _write(job, how, checkpoints)
            if job.is_done and on_progress is not None:
                for run in job.runs:
                    on_progress(run, job.epoch, None)
        active = [job for job in active if not job.is_done]


def _open(job: _Job, how: Execution, checkpoints: Path | None, say: Log) -> None:
    runner = job.runner
    data = runner.data(job.runs[0].cell.num_parties)
    for index, run in enumerate(job.runs):
        simulation = GraphedSimulation(run.plan, data, execution=how, augment=runner.study.augment)
        started = time.perf_counter()
        simulation.prepare()
        say(f"{run.label}: ready after {time.perf_counter() - started:.1f} s")
        if checkpoints is not None and (path := _checkpoint(checkpoints, run)).is_file():
            earlier = runner.records.read(runner.study.dataset, run.cell.name, run.seed)
            epochs = GraphedSimulation.epochs_in(path)
            if earlier is not None and len(earlier.history) >= epochs:  # weights without their curve are of no use
                simulation.load(path)
                simulation.history = earlier.history[:epochs]
                job.seconds[index] = earlier.seconds
                say(f"{run.label}: continues after epoch {epochs}")
        job.simulations.append(simulation)


def _checkpoint(folder: Path, run: Run) -> Path:
    return folder / f"{run.cell.name}-seed{run.seed}.npz"


def _write(job: _Job, how: Execution, checkpoints: Path | None) -> None:
    name = torch.cuda.get_device_name(how.device) if how.device.type == "cuda" else "cpu"
    number = "bf16" if how.bf16 else "float32"
    for run, simulation, seconds in zip(job.runs, job.simulations, job.seconds, strict=True):
        engine = f"captured rounds, {name}, {number}, torch {torch.__version__}"
        job.runner.save(run, simulation.history, seconds=seconds, engine=engine)
        if checkpoints is not None:
            checkpoints.mkdir(parents=True, exist_ok=True)
            simulation.save(_checkpoint(checkpoints, run))


# --- measuring ---


def eager_seconds(plan: Plan, data: VerticalDataset, *, device: torch.device, rounds: int) -> float:
    """Time one round of a plain loop in the authors' style: party after party, float32, every network twice."""
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
    """Estimate the seconds of a round's products alone, at the measured speed of one large bf16 product."""
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
    """Measure seconds per epoch: one configuration, several at once, the eager loop, and the matrix work alone."""
    device = execution.device
    run = next(run for run in runner.runs() if run.cell.mechanism == "pbm" and run.plan.num_trials == 16)
    data = runner.data(run.cell.num_parties)
    rounds = run.plan.schedule.rounds_per_pass(JOINT)
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
    parser = argparse.ArgumentParser(description="Run a study on a GPU, several configurations at once.")
    parser.add_argument("--study", required=True, action="append", help="table1, figure-cifar, ...; may repeat")
    parser.add_argument("--studies", type=Path, default=None, help="folder of own configs, NAME.json")
    parser.add_argument("--data", type=Path, default=None, help="folder with cifar10/, modelnet10/, ...")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--limit-epochs", type=int, default=[], action="append", help="of each study in turn; 0: what it says itself"
    )
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
        wanted: list[tuple[StudyRunner, list[Run]]] = []
        parts = given.only.split(",")
        for name, limit in zip_longest(given.study, given.limit_epochs[: len(given.study)]):
            study = read_study(name, given.studies)
            runner = StudyRunner(
                study.quickened() if given.quick else study,
                out=given.out,
                seeds=given.seeds,
                device=given.device,
                data_folder=given.data,
                limit_epochs=limit,
            )
            if given.measure:
                found = measure(runner, execution=how, together=given.together, epochs=3, log=log)
                (given.out / f"speed-{study.name}.json").write_text(json.dumps(found, indent=1) + "\n")
                continue
            missing = [run for run in runner.missing() if any(part in run.cell.name for part in parts)]
            log(f"{study.name}: {len(missing)} runs to go, {runner.limit_epochs} epochs at most")
            wanted.append((runner, missing))
        run_together(wanted, execution=how, together=given.together, checkpoints=given.checkpoints, log=log)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runner of a study's missing runs, one record per run; a second call resumes where the first one ended.

Also used on a machine with torch and numpy alone, so progress is a callback and pictures are drawn elsewhere.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pbmvfl.crypto.public_streams import SPLIT_STREAM, public_permutation
from pbmvfl.data.datasets import data_root, load_dataset
from pbmvfl.data.sources import cache_root
from pbmvfl.data.vertical import Layout, VerticalDataset, numbered_parties, split_whole
from pbmvfl.errors import DataError, PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.research.reproduction.records import Record, Records, epochs_to, is_measured_near, mean_epochs_to
from pbmvfl.research.reproduction.studies import Cell, Study
from pbmvfl.research.simulation import Simulation

# --- Rows of a study: the real data set, part of it, or in a smoke run a synthetic stand-in of the same form ---


NO_DATA = "not run here, no data"
#: The kept rows are public and the same for every seed of a study, as the data is.
_ROWS_SEED = 0


@dataclass(frozen=True)
class _Form:
    layout: Layout
    shape: tuple[int, ...]
    num_classes: int
    encoder: str


#: Stand-ins: columns of a table, or whole pictures before they are cut.
_FORMS = {
    "phishing": _Form("columns", (30,), 2, "mlp"),
    "activity": _Form("columns", (560,), 6, "mlp"),
    "cifar10": _Form("quadrants", (3, 32, 32), 10, "resnet18"),
    "modelnet10": _Form("views", (12, 32, 32), 10, "multiview-conv"),
    "imagenet100": _Form("quadrants", (3, 144, 144), 100, "resnet18"),
}


def has_copy(dataset: str, root: Path | None = None) -> bool:
    """Return True if the data set is on this machine, so that nothing has to be fetched."""
    folders = [folder for folder in (root, data_root(), cache_root()) if folder is not None]
    return any((folder / dataset).is_dir() and any((folder / dataset).iterdir()) for folder in folders)


def load_study_data(study: Study, num_parties: int, *, root: Path | None = None) -> tuple[VerticalDataset, bool]:
    """Load the data, split for this many parties.

    Returns:
        The data, and True if they are a stand-in.

    Raises:
        DataError: If there is no copy.
    """
    if study.quick and not has_copy(study.dataset, root):
        return _stand_in(study, num_parties), True
    if study.dataset == "imagenet100" and not has_copy("imagenet100", root):
        raise DataError(f"imagenet100: {NO_DATA}")
    data = load_dataset(study.dataset, num_parties=num_parties, root=root, progress=False)
    return _fewer_rows(data, study), False


def _fewer_rows(data: VerticalDataset, study: Study) -> VerticalDataset:
    wanted = study.num_samples
    if wanted is None or wanted >= data.num_samples:
        return data
    rows = public_permutation(data.num_samples, seed=_ROWS_SEED, stream=SPLIT_STREAM)[:wanted]
    test_rows = slice(None, wanted) if study.quick else slice(None)
    return replace(
        data,
        train_features=tuple(np.ascontiguousarray(part[rows]) for part in data.train_features),
        train_labels=data.train_labels[rows],
        test_features=tuple(np.ascontiguousarray(part[test_rows]) for part in data.test_features),
        test_labels=data.test_labels[test_rows],
    )


def _stand_in(study: Study, num_parties: int) -> VerticalDataset:
    """Make synthetic rows in which the class moves every column a little: enough to see that a study runs."""
    form = _FORMS[study.dataset]
    random = np.random.default_rng(0)
    rows = study.num_samples or 200
    labels = random.integers(0, form.num_classes, 2 * rows).astype(np.int64)
    labels[: form.num_classes] = np.arange(form.num_classes)[: 2 * rows]
    centres = random.random((form.num_classes, *form.shape), dtype=np.float32)
    noisy = centres[labels] + 0.3 * random.standard_normal((2 * rows, *form.shape), dtype=np.float32)
    whole = noisy if form.layout == "columns" else (noisy.clip(0, 1) * 255).astype(np.uint8)
    return VerticalDataset(
        name=study.dataset,
        party_names=numbered_parties(num_parties),
        train_features=split_whole(whole[:rows], layout=form.layout, num_parties=num_parties),
        test_features=split_whole(whole[rows:], layout=form.layout, num_parties=num_parties),
        train_labels=labels[:rows],
        test_labels=labels[rows:],
        class_names=tuple(str(label) for label in range(form.num_classes)),
        default_encoder=form.encoder,
        layout=form.layout,
        notes=("Made-up rows: a stand-in where no copy of the data is at hand.",),
    )


# --- Runs ---


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that a study needs."""

    cell: Cell
    seed: int
    plan: Plan

    @property
    def label(self) -> str:
        return f"{self.cell.name} seed {self.seed}"


#: Called with (run, epochs done of it, its latest line); the line is None when the run is over.
OnProgress = Callable[[Run, int, dict[str, Any] | None], None]


class StudyRunner:
    """Runs of one study on this machine."""

    def __init__(
        self,
        study: Study,
        *,
        out: Path,
        seeds: int,
        device: str = "cpu",
        data_folder: Path | None = None,
        limit_epochs: int | None = None,
    ) -> None:
        self.study = study
        self.records = Records(out)
        self._seeds = range(seeds)
        self._device = device
        self._root = data_folder
        self.limit_epochs = limit_epochs or study.limit_epochs
        self._data: dict[int, tuple[VerticalDataset, bool]] = {}

    def data(self, num_parties: int) -> VerticalDataset:
        return self._loaded(num_parties)[0]

    @property
    def uses_stand_in(self) -> bool:
        return any(stand_in for _, stand_in in self._data.values())

    def _loaded(self, num_parties: int) -> tuple[VerticalDataset, bool]:
        if num_parties not in self._data:
            cut = next(((data, made_up) for data, made_up in self._data.values() if not made_up), None)
            if cut is not None and cut[0].layout != "assigned":
                self._data[num_parties] = (cut[0].split_features(num_parties=num_parties), False)
            else:
                self._data[num_parties] = load_study_data(self.study, num_parties, root=self._root)
        return self._data[num_parties]

    def plan(self, cell: Cell, seed: int) -> Plan:
        data = self.data(cell.num_parties)
        sizes = {name: getattr(data, name) for name in ("num_samples", "num_test_samples", "num_classes")}
        plan = self.study.make_plan(cell, seed=seed, sizes=sizes)
        return plan if plan.num_epochs >= self.limit_epochs else plan.replace(num_epochs=self.limit_epochs)

    def runs(self) -> Iterator[Run]:
        """Yield every run of the study, all configurations of a seed before the next seed."""
        for seed in self._seeds:
            for cell in self.study.all_cells():
                yield Run(cell=cell, seed=seed, plan=self.plan(cell, seed))

    def _record(self, cell: Cell, seed: int) -> Record | None:
        """Return a run of this configuration on this data, however long, or None."""
        record = self.records.read(self.study.dataset, cell.name, seed)
        if record is None or not record.is_of(self.plan(cell, seed)):
            return None
        return record if record.stand_in == self._loaded(cell.num_parties)[1] else None

    def records_of(self, cell: Cell) -> list[Record] | None:
        """Return the finished runs of a configuration, one per seed, if together they suffice for this study."""
        found = [self._record(cell, seed) for seed in self._seeds]
        records = [record for record in found if record is not None]
        return records if len(records) == len(found) and self.is_done([r.history for r in records]) else None

    def shown_records(self, cell: Cell) -> list[Record] | None:
        """Return the runs of a configuration that a table can show: its finished ones, or else the existing seeds.

        A figure needs curves of equal length and all seeds.
        """
        finished = self.records_of(cell)
        if finished is not None or not self.study.is_table:
            return finished
        found = (self._record(cell, seed) for seed in self._seeds)
        return [record for record in found if record is not None and self._is_measured([record.history])] or None

    def is_done(self, histories: Sequence[list[dict[str, Any]]]) -> bool:
        """Return True if runs of one configuration are long enough.

        That is: to the limit, or until every seed and their mean curve have reached the target.
        """
        length = min(len(history) for history in histories)
        if not self._is_measured(histories):
            return False
        if length >= self.limit_epochs:
            return True
        target = self.study.target
        if target is None:
            return False
        return (
            all(epochs_to(history, *target) for history in histories) and mean_epochs_to(histories, *target) is not None
        )

    def _is_measured(self, histories: Sequence[list[dict[str, Any]]]) -> bool:
        """Return True if the runs have the study's metric, measured on all rows near the target."""
        if any(not history or self.study.metric not in history[0] for history in histories):
            return False
        target = self.study.target
        if target is None or target[0] != "train_accuracy":
            return True
        num_rows = next(data.num_samples for data, _ in self._data.values())
        return all(is_measured_near(history, target[1], num_rows) for history in histories)

    def missing(self) -> list[Run]:
        """Return the runs to make.

        Runs to the limit stay; shorter ones of an unfinished configuration are run again, because the mean of all its
        seeds decides where they stop.
        """
        short = {cell for cell in self.study.all_cells() if self.records_of(cell) is None}
        return [run for run in self.runs() if run.cell in short and not self._is_whole(run)]

    def _is_whole(self, run: Run) -> bool:
        record = self._record(run.cell, run.seed)
        return record is not None and len(record.history) >= self.limit_epochs and self.is_done([record.history])

    def others(self, runs: Sequence[Run]) -> list[list[dict[str, Any]]]:
        """Return the curves of the configuration's other seeds, which were run to the limit."""
        cell, ours = runs[0].cell, {run.seed for run in runs}
        found = (self._record(cell, seed) for seed in self._seeds if seed not in ours)
        return [record.history for record in found if record is not None]

    def run_missing(self, on_progress: OnProgress | None = None) -> None:
        missing = self.missing()
        if missing and self._is_graphed:
            from pbmvfl.research.reproduction.cuda import run_together

            run_together([(self, missing)], on_progress=on_progress)
            return
        cells = dict.fromkeys(run.cell for run in missing)
        for cell in cells:
            self._run([run for run in missing if run.cell == cell], on_progress)

    @property
    def _is_graphed(self) -> bool:
        """Return True for the engine of captured rounds, which runs augmented pictures and everything on a GPU.

        It measures accuracy alone; studies that need another metric are small and run on the CPU anyway.
        """
        return self.study.augment or (self._device != "cpu" and self.study.metric.endswith("accuracy"))

    def check_line(self, line: dict[str, Any]) -> None:
        """Refuse an engine that does not measure what this study needs."""
        needed = {self.study.metric} | ({self.study.target[0]} if self.study.target else set())
        if not needed <= line.keys():
            lacking = ", ".join(sorted(needed - line.keys()))
            raise PlanError(f"{self.study.name} needs {lacking}, which this engine does not measure; use --device cpu")

    @property
    def device(self) -> str:
        return self._device

    def _run(self, runs: Sequence[Run], on_progress: OnProgress | None) -> None:
        """Run all seeds of a configuration, epoch by epoch together: the mean of their curves decides when to stop."""
        data = self.data(runs[0].cell.num_parties)
        simulations = [Simulation(run.plan, data) for run in runs]
        seconds = [0.0] * len(runs)
        histories = [simulation.history for simulation in simulations]
        others = self.others(runs)
        while not self.is_done([*histories, *others]):
            for index, (run, simulation) in enumerate(zip(runs, simulations, strict=True)):
                started = time.perf_counter()
                simulation.fit(
                    limit_epochs=simulation.completed_epochs + 1,
                    splits=("train",) if self.study.is_table else ("train", "test"),
                )
                seconds[index] += time.perf_counter() - started
                self.check_line(simulation.history[-1])
                if on_progress is not None:
                    on_progress(run, simulation.completed_epochs, simulation.history[-1])
        engine = f"batched parties, {platform.machine()}, torch {torch.__version__}"
        for run, history, spent in zip(runs, histories, seconds, strict=True):
            self.save(run, history, seconds=spent, engine=engine)
            if on_progress is not None:
                on_progress(run, len(history), None)

    def save(self, run: Run, history: Sequence[dict[str, Any]], *, seconds: float, engine: str) -> None:
        """Write a run, unless a longer one of the same is recorded."""
        there = self._record(run.cell, run.seed)
        if there is not None and len(there.history) > len(history) and there.history[0].keys() >= history[0].keys():
            return
        data, made_up = self._loaded(run.cell.num_parties)
        record = Record(
            plan=run.plan,
            dataset=self.study.dataset,
            history=list(history),
            engine=engine,
            seconds=seconds,
            stand_in=made_up,
            notes=(*self.study.notes, *data.notes),
        )
        self.records.write(record, run.cell.name, run.seed)

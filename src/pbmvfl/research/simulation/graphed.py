"""One configuration on a GPU: a round of the whole federation captured once as a CUDA graph and replayed.

Every party's network runs on its own stream inside the graph, because one ResNet on a hundred 16x16 pictures fills a
fraction of the device; several configurations replay at once on their streams. Forward and backward are compiled,
pictures are channels-last, arithmetic is bf16 (weights, sums, noise and steps stay float32). Counters stay on the
device, so nothing waits for the host inside an epoch. On the CPU the same code runs without graphs, streams,
compilation or bf16: that is what the tests compare with the Federation.

Shape suffixes: M parties, B rows, P embedding_dim, K classes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pbmvfl._files import write_atomically
from pbmvfl.crypto.public_streams import SCHEDULE_STREAM, public_permutation
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.plan.groups import OptimizerName
from pbmvfl.plan.plan import Plan
from pbmvfl.research.simulation.augmentation import Rows
from pbmvfl.research.simulation.engine import SIMULATED, check_plan, noisy_sum
from pbmvfl.research.simulation.networks import Everything
from pbmvfl.training.encoders import build_encoder, build_head
from pbmvfl.training.head import mean_loss
from pbmvfl.training.optimizer import Trainer

#: Rows of one evaluation batch, about; batch statistics of so many rows are steadier than those of a round.
_EVALUATION_ROWS = 1000
#: Rows that tell whether measuring all of them is worth it: a share of them is off by less than 0.005 as a rule.
SCREEN_ROWS = 10_000
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Choices of how to run; none changes the results beyond rounding."""

    device: torch.device
    bf16: bool = True
    compiled: bool = True
    graphs: bool = True
    party_streams: bool = True

    @classmethod
    def on(cls, device: str, **choices: bool) -> Execution:
        """Choose everything on a GPU, nothing of it on the CPU."""
        if torch.device(device).type == "cpu":
            return cls(device=torch.device(device), bf16=False, compiled=False, graphs=False, party_streams=False)
        return cls(device=torch.device(device), **choices)


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphedSimulation:
    """Simulated training of a plan on data, epoch by epoch, without waiting for the host between rounds."""

    noise = SIMULATED

    def __init__(self, plan: Plan, data: VerticalDataset, *, execution: Execution, augment: bool = False) -> None:
        check_plan(plan)
        if plan.optimizer is not OptimizerName.SGD and execution.graphs:
            raise PlanError(f"optimizer={plan.optimizer}: the captured round steps with sgd; use sgd or device cpu")
        self.plan, self._how = plan, execution
        device = execution.device
        encoders = nn.ModuleList(
            build_encoder(plan, index=m, input_shape=part.shape[1:]) for m, part in enumerate(data.train_features)
        )
        self.encoders = encoders.to(device)
        if data.train_features[0].ndim == 4:
            self.encoders = self.encoders.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = build_head(plan).to(device)
        self._run: list[Callable[[Tensor], Tensor]] = list(self.encoders)
        if execution.compiled:
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            self._run = [torch.compile(encoder, dynamic=False) for encoder in self.encoders]
        self._trainer = Trainer(plan, Everything(self.encoders, self.head))
        self._noisy_sum = noisy_sum(plan, device)
        self._train = Rows(
            data.train_features, data.train_labels, batch_size=plan.batch_size, device=device, augment=augment
        )
        self._test: Rows | None = None
        if data.num_test_samples:
            rows = min(_EVALUATION_ROWS, data.num_test_samples)
            self._test = Rows(data.test_features, data.test_labels, batch_size=rows, device=device)
            self._test.fill()
        self._grouped = next(k for k in range(10, 0, -1) if self._train.rounds % k == 0)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self.completed_epochs = 0
        #: The epoch whose rows are in the buffers.
        self._filled: int | None = None
        self.history: list[dict[str, Any]] = []
        self.stream = _stream(device) if device.type == "cuda" else None
        self._party_streams: list[Any] = []
        if execution.party_streams:
            self._party_streams = [_stream(device) for _ in range(plan.num_parties)]
        self._graphs: dict[str, Any] = {}
        self._pool: Any = None

    # --- one round, as it is captured ---

    @contextlib.contextmanager
    def _on_party_stream(self, m: int) -> Iterator[None]:
        """Run party m's work after all that the main stream was given so far; `_join` ends it."""
        if not self._party_streams:
            yield
            return
        stream = self._party_streams[m]
        stream.wait_stream(torch.cuda.current_stream(self._how.device))
        with torch.cuda.stream(stream):
            yield

    def _join(self) -> None:
        for stream in self._party_streams:
            torch.cuda.current_stream(self._how.device).wait_stream(stream)

    def _embed(self, batches: Sequence[Tensor], networks: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        device = self._how.device.type
        embeddings = []
        for m, (network, batch) in enumerate(zip(networks, batches, strict=True)):
            with self._on_party_stream(m), torch.autocast(device, torch.bfloat16, enabled=self._how.bf16):
                embeddings.append(network(self._train.as_input(batch)).float())
        self._join()
        return embeddings

    def _round(self, parts: Sequence[Tensor], labels: Tensor) -> None:
        """Run the round at `_position` (read, embed, add noise, learn, step) and advance the position."""
        batches = [part.index_select(0, self._position)[0] for part in parts]
        labels_B = labels.index_select(0, self._position)[0]
        embeddings = self._embed(batches, self._run)
        with torch.no_grad():
            estimated_sum_BP = self._noisy_sum(torch.stack([e.detach() for e in embeddings]))
        estimated_sum_BP.requires_grad_()
        # By autograd, because a captured round runs on the device: the loops of `HeadLoss` are for the CPU.
        loss = mean_loss(self.head(estimated_sum_BP), labels_B, self.plan.loss)
        gradient_BP, *head_slopes = torch.autograd.grad(loss, [estimated_sum_BP, *self.head.parameters()])
        slopes: list[Tensor] = []
        for m, (encoder, embedding) in enumerate(zip(self.encoders, embeddings, strict=True)):
            with self._on_party_stream(m):
                slopes += torch.autograd.grad(embedding, list(encoder.parameters()), gradient_BP)
        self._join()
        self._trainer.step([*slopes, *head_slopes])
        with torch.no_grad():
            self._loss += loss.detach() * len(labels_B)
            self._position += 1

    # --- evaluation, as it is captured ---

    @torch.no_grad()
    def _count_correct(self, batches: Sequence[Tensor], labels_B: Tensor) -> None:
        """Add the rows that the exact sum classifies correctly. Not compiled: the batch size and the mode differ."""
        embeddings = self._embed(batches, list(self.encoders))
        scores_BK = self.head(torch.stack(embeddings).sum(0))
        self._correct += (scores_BK.argmax(1) == labels_B).sum()

    def _evaluate_train(self) -> None:
        """Evaluate some rounds of the coming epoch together, with statistics of the batch."""
        first = self._position * self._grouped
        rounds = first + torch.arange(self._grouped, device=self._how.device)
        batches = [part.index_select(0, rounds).flatten(0, 1) for part in self._train.batches]
        with self._batch_statistics():
            self._count_correct(batches, self._train.labels.index_select(0, rounds).flatten())
        with torch.no_grad():
            self._position += 1

    def _evaluate_rest(self) -> None:
        with self._batch_statistics():
            self._count_correct([part[0] for part in self._train.rest], self._train.rest_labels[0])

    @contextlib.contextmanager
    def _batch_statistics(self) -> Iterator[None]:
        """Normalise by the batch and leave the running statistics unchanged."""
        norms = [module for module in self.encoders.modules() if isinstance(module, nn.BatchNorm2d)]
        kept = [
            (norm.momentum, norm.num_batches_tracked.clone()) for norm in norms if norm.num_batches_tracked is not None
        ]
        for norm in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, (momentum, tracked) in zip(norms, kept, strict=True):
                norm.momentum = momentum
                assert norm.num_batches_tracked is not None
                norm.num_batches_tracked.copy_(tracked)

    def _evaluate_test(self) -> None:
        """Evaluate test rows with the running statistics, as a federation does."""
        assert self._test is not None
        batches = [part.index_select(0, self._position)[0] for part in self._test.batches]
        with self._running_statistics():
            self._count_correct(batches, self._test.labels.index_select(0, self._position)[0])
        with torch.no_grad():
            self._position += 1

    def _evaluate_test_rest(self) -> None:
        assert self._test is not None
        with self._running_statistics():
            self._count_correct([part[0] for part in self._test.rest], self._test.rest_labels[0])

    @contextlib.contextmanager
    def _running_statistics(self) -> Iterator[None]:
        self.encoders.eval()
        try:
            yield
        finally:
            self.encoders.train()

    # --- capturing ---

    def _steps(self) -> dict[str, Callable[[], None]]:
        train, test = self._train, self._test
        steps: dict[str, Callable[[], None]] = {
            "round": lambda: self._round(train.batches, train.labels),
            "train": self._evaluate_train,
        }
        if train.rest_rows:
            steps["rest"] = lambda: self._round(train.rest, train.rest_labels)
            steps["train-rest"] = self._evaluate_rest
        if test is not None:
            steps["test"] = self._evaluate_test
            if test.rest_rows:
                steps["test-rest"] = self._evaluate_test_rest
        return steps

    def prepare(self) -> None:
        """Compile and capture. What the warm-up rounds did to weights and generator is undone."""
        steps = self._steps()
        if not self._how.graphs:
            self._graphs = steps
            return
        assert self.stream is not None
        self._fill_epoch()
        # detached: a graph held from here would tie the weights to the default stream, which cannot be captured
        before = {name: value.detach().clone() for name, value in self._tensors().items()}
        noise = self._noisy_sum.state()
        self.stream.wait_stream(torch.cuda.current_stream(self._how.device))
        self._pool = torch.cuda.graph_pool_handle()
        for name, step in steps.items():
            with torch.cuda.stream(self.stream):
                for _ in range(_WARM_UP_ROUNDS):
                    self._position.zero_()
                    step()
                self._position.zero_()
            torch.cuda.synchronize(self._how.device)
            graph = torch.cuda.CUDAGraph()
            generator = getattr(self._noisy_sum, "generator", None)
            if generator is not None:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
                step()
            self._graphs[name] = graph.replay
        torch.cuda.synchronize(self._how.device)
        with torch.no_grad():
            for name, value in self._tensors().items():
                value.copy_(before[name])
        self._noisy_sum.load_state(noise)

    def _tensors(self) -> dict[str, Tensor]:
        """Return everything that a round changes, in place."""
        everything = self._trainer.network
        found = {**dict(everything.named_parameters()), **dict(everything.named_buffers())}
        found |= {f"velocity.{i}": value for i, value in enumerate(self._trainer._velocity)}
        return found

    # --- an epoch ---

    def _fill_epoch(self) -> None:
        """Write the coming epoch's rows with fresh crops and flips.

        Training accuracy is measured on them too: a network remembers the crops that it has just been trained on.
        """
        plan, epoch = self.plan, self.completed_epochs
        if self._filled == epoch:
            return
        order = public_permutation(plan.num_samples, seed=plan.seed, stream=SCHEDULE_STREAM, index=epoch)
        self._train.fill(order, seed=plan.seed, epoch=epoch)
        self._filled = epoch

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def start_epoch(self) -> Iterator[None]:
        """Give the device one round after another; a caller with several runs takes turns between the yields."""
        if not self._graphs:
            self.prepare()
        with self._on_stream():
            self._fill_epoch()
            self._loss.zero_()
            self._position.zero_()
        for _ in range(self._train.rounds):
            with self._on_stream():
                self._graphs["round"]()
            yield
        with self._on_stream():
            if self._train.rest_rows:
                self._position.zero_()
                self._graphs["rest"]()
        self.completed_epochs += 1

    @property
    def screen_groups(self) -> int:
        """Return how many evaluation batches hold SCREEN_ROWS training rows, at most all of them."""
        groups = self._train.rounds // self._grouped
        return min(groups, -(-SCREEN_ROWS // (self._grouped * self._train.batch_size)))

    @property
    def screen_rows(self) -> int:
        return self.screen_groups * self._grouped * self._train.batch_size

    def start_screening(self) -> None:
        """Count correct predictions among the first SCREEN_ROWS rows of the coming epoch, whose order is random."""
        with self._on_stream():
            self._fill_epoch()
            self._position.zero_()
            self._correct.zero_()
            for _ in range(self.screen_groups):
                self._graphs["train"]()

    def finish_screening(self) -> float:
        with self._on_stream():
            return self._correct.item() / self.screen_rows

    def continue_evaluation(self) -> None:
        """Evaluate the training rows that the screening left out."""
        with self._on_stream():
            for _ in range(self._train.rounds // self._grouped - self.screen_groups):
                self._graphs["train"]()
            if self._train.rest_rows:
                self._graphs["train-rest"]()

    def start_test(self) -> None:
        assert self._test is not None
        with self._on_stream():
            self._position.zero_()
            self._correct.zero_()
            for _ in range(self._test.rounds):
                self._graphs["test"]()
            if self._test.rest_rows:
                self._graphs["test-rest"]()

    def finish_evaluation(self, split: str) -> float:
        rows = self._train if split == "train" else self._test
        assert rows is not None
        with self._on_stream():
            return self._correct.item() / rows.count

    @property
    def has_test_rows(self) -> bool:
        return self._test is not None

    def finish_epoch(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Wait for the epoch, and add its line to the history."""
        with self._on_stream():
            loss = self._loss.item() / self.plan.num_samples
        line = {"epoch": self.completed_epochs, "train_loss": loss, **metrics}
        self.history.append(line)
        return line

    def run_epoch(self) -> dict[str, Any]:
        take_turns([self])
        return evaluate_together([self])[0]

    # --- state ---

    def save(self, path: Path) -> None:
        """Write weights, moments, running statistics and the generator's state, as plain arrays."""
        arrays = {name: value.cpu().numpy() for name, value in self._trainer.state().items()}
        noise = self._noisy_sum.state().cpu().numpy()
        buffer = io.BytesIO()
        np.savez(buffer, noise=noise, epochs=np.int64(self.completed_epochs), allow_pickle=False, **arrays)
        write_atomically(path, buffer.getvalue())

    @staticmethod
    def epochs_in(path: Path) -> int:
        """Return the number of epochs behind the weights in this file."""
        with np.load(path, allow_pickle=False) as arrays:
            return int(arrays["epochs"])

    def load(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            values = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name not in ("noise", "epochs")}
            self._trainer.load_state(values)
            self._noisy_sum.load_state(torch.from_numpy(arrays["noise"]))
            self.completed_epochs = int(arrays["epochs"])
        self._filled = None


def take_turns(simulations: Sequence[GraphedSimulation]) -> None:
    """Run one epoch of each, round by round in turn: every stream always has work."""
    waiting = [simulation.start_epoch() for simulation in simulations]
    done = object()
    while waiting:
        waiting = [rounds for rounds in waiting if next(rounds, done) is not done]


def evaluate_together(simulations: Sequence[GraphedSimulation], *, screen: float = 0.0) -> list[dict[str, Any]]:
    """Return the lines of the epoch that each has just finished; all are started before the host waits for any.

    A simulation whose accuracy on SCREEN_ROWS training rows is below `screen` is not measured on all of them.
    """
    metrics: list[dict[str, Any]] = [{} for _ in simulations]
    for simulation in simulations:
        simulation.start_screening()
    for simulation, found in zip(simulations, metrics, strict=True):
        found["train_accuracy"] = simulation.finish_screening()
        found["train_rows"] = simulation.screen_rows
    near = [pair for pair in zip(simulations, metrics, strict=True) if pair[1]["train_accuracy"] >= screen]
    for simulation, _ in near:
        simulation.continue_evaluation()
    for simulation, found in near:
        found["train_accuracy"] = simulation.finish_evaluation("train")
        found["train_rows"] = simulation.plan.num_samples
    tested = [pair for pair in zip(simulations, metrics, strict=True) if pair[0].has_test_rows]
    for simulation, _ in tested:
        simulation.start_test()
    for simulation, found in tested:
        found["test_accuracy"] = simulation.finish_evaluation("test")
    return [simulation.finish_epoch(found) for simulation, found in zip(simulations, metrics, strict=True)]

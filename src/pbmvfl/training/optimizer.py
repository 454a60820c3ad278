"""Optimiser steps as the plan says, and network state as named tensors, for parties and the server."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pbmvfl.errors import CheckpointError
from pbmvfl.plan.groups import OptimizerName
from pbmvfl.plan.plan import Plan

#: Far beyond what training needs; a weight that reaches it has diverged.
LARGEST_WEIGHT = 1e6
#: Often enough that a network recovers, seldom enough to cost nothing.
STEPS_BETWEEN_TIDYING = 16
#: Before the names of a network's weights and buffers in a state.
WEIGHTS = "model."
_MOMENT = "moment."
_AVERAGE = "average."
#: Beside the sums of an average: how many steps there were.
_STEPS = _AVERAGE + "steps"


class Trainer:
    """Network and its optimiser, stepped with gradients that were computed elsewhere.

    Networks here are small enough that torch.optim's bookkeeping is a third of a step, and its first optimiser loads
    torch's compiler, which takes a second. So SGD is written out (two calls for all weights together), and Adam calls
    torch's own step. If the plan averages, the last step of the run replaces the weights by their mean over its last
    steps.

    Args:
        plan: The training plan.
        network: The network; its parameters that require a gradient learn.
        num_steps: Steps of the whole run, by default one for each round that trains.
    """

    def __init__(self, plan: Plan, network: nn.Module, *, num_steps: int | None = None) -> None:
        self.network = network
        self.parameters: list[Tensor] = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._weights = [parameter.detach() for parameter in self.parameters]  # the same memory, outside autograd
        self._learning_rate = plan.learning_rate
        self._momentum, self._nesterov = plan.momentum, plan.nesterov
        if num_steps is None:
            num_steps = sum(plan.schedule.num_rounds(kind) for kind in plan.schedule.kinds if kind.trains)
        self._num_steps, self._taken = num_steps, 0
        #: How many of the last steps are averaged.
        self._averaged = math.ceil(plan.averaging * num_steps)
        self._sums = [torch.zeros_like(each) for each in self._weights] if self._averaged else []
        self._velocity: list[Tensor] = []
        self._adam: _Adam | None = None
        if plan.optimizer is OptimizerName.ADAM and self.parameters:  # a fixed head has none
            self._adam = _Adam(self._weights, learning_rate=plan.learning_rate)
        elif plan.momentum:
            self._velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

    def slopes(self, output: Tensor, gradient: Tensor | None = None, *, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Apply the chain rule from the gradient of `output` to `inputs` and to every weight. Changes nothing."""
        wanted = [*inputs, *self.parameters]
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        slopes = list(found)
        if any(slope is None for slope in found):  # weights that this output does not depend on
            slopes = [
                slope if slope is not None else torch.zeros_like(t) for slope, t in zip(found, wanted, strict=True)
            ]
        return slopes

    def step(self, slopes: list[Tensor]) -> None:
        """Step once along the slopes of the weights."""
        self._step(slopes)
        if self._averaged:
            self._average()

    def _average(self) -> None:
        self._taken += 1
        if self._taken <= self._num_steps - self._averaged or self._taken > self._num_steps:
            return
        torch._foreach_add_(self._sums, self._weights)
        if self._taken == self._num_steps:
            for weight, total in zip(self._weights, self._sums, strict=True):
                weight.copy_(total / self._averaged)

    def _step(self, slopes: list[Tensor]) -> None:
        if not slopes:
            return
        if self._adam is not None:
            self._adam.step(slopes)
            return
        if self._momentum:
            torch._foreach_mul_(self._velocity, self._momentum)
            torch._foreach_add_(self._velocity, slopes)
            ahead = torch._foreach_mul(self._velocity, self._momentum) if self._nesterov else ()
            slopes = list(torch._foreach_add(ahead, slopes)) if self._nesterov else self._velocity
        # Algorithm 2, lines 13 and 18.
        torch._foreach_add_(self._weights, slopes, alpha=-self._learning_rate)

    def state(self) -> dict[str, Tensor]:
        """Return weights, buffers and moments as flat named tensors: one role's part of a checkpoint."""
        state = {WEIGHTS + name: value for name, value in self.network.state_dict().items()}
        state |= {f"{_MOMENT}{index}.velocity": value for index, value in enumerate(self._velocity)}
        if self._adam is not None:
            for index, of_weight in enumerate(self._adam.moments):
                state |= {f"{_MOMENT}{index}.{name}": value for name, value in of_weight.items()}
        if self._averaged:
            state |= {f"{_AVERAGE}{index}": value for index, value in enumerate(self._sums)}
            state[_STEPS] = torch.tensor([self._taken])
        return {name: value.detach().clone().contiguous() for name, value in state.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a checkpointed state; names and shapes must fit exactly.

        Raises:
            CheckpointError: If they do not.
        """
        _check_same_shapes(state, self.state())
        weights = {name.removeprefix(WEIGHTS): value for name, value in state.items() if name.startswith(WEIGHTS)}
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key.startswith(_MOMENT):
                index, name = key.removeprefix(_MOMENT).split(".", 1)
                moments.setdefault(int(index), {})[name] = value
        try:
            self.network.load_state_dict(weights)
            if self._adam is not None:
                for position, of_weight in enumerate(self._adam.moments):
                    for name, value in of_weight.items():
                        value.copy_(moments[position][name])
            else:
                for position, velocity in enumerate(self._velocity):
                    velocity.copy_(moments[position]["velocity"])
            if self._averaged:
                self._taken = int(state[_STEPS])
                for position, total in enumerate(self._sums):
                    total.copy_(state[f"{_AVERAGE}{position}"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint does not fit the network: {error}") from error


class _Adam:
    """Adam with torch.optim's defaults, by the fused step that it uses itself."""

    def __init__(self, weights: Sequence[Tensor], *, learning_rate: float) -> None:
        self._weights, self._learning_rate = weights, learning_rate
        #: By weight, named as torch.optim names them. The step wants them in the weights' memory order.
        self.moments = [
            {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
            for weight in weights
        ]
        kinds = [(weight.device, weight.dtype) for weight in weights]
        #: Positions of the weights that one step can take together.
        self._together = [[at for at, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)]

    def step(self, slopes: Sequence[Tensor]) -> None:
        for positions in self._together:
            steps, first, second = (
                [self.moments[at][name] for at in positions] for name in ("step", "exp_avg", "exp_avg_sq")
            )
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                [self._weights[at] for at in positions],
                [slopes[at] for at in positions],
                first,
                second,
                [],
                steps,
                lr=self._learning_rate,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


class TotalTrainer(Trainer):
    """Trainer that continues whatever the slopes are.

    Every so many steps NaN among weights and moments becomes zero, and the others are clamped to a wide range. When
    that happens depends on the number of steps alone, never on the values: odd values take no other time, and ordinary
    ones are unchanged. In between, NaN weights make NaN embeddings, which a mechanism takes for 0.
    """

    def __init__(self, plan: Plan, network: nn.Module) -> None:
        super().__init__(plan, network)
        self._steps = 0

    def step(self, slopes: list[Tensor]) -> None:
        super().step(slopes)
        self._steps += 1
        averaged = bool(self._averaged) and self._taken == self._num_steps
        if averaged or self._steps % STEPS_BETWEEN_TIDYING == 0:
            for values in (*self._weights, *self._velocity, *self._sums):
                _tidy(values)
            if self._adam is not None:
                for moments in self._adam.moments:
                    _tidy(moments["exp_avg"])
                    _tidy(moments["exp_avg_sq"])


def _tidy(values: Tensor) -> None:
    torch.nan_to_num_(values, nan=0.0, posinf=LARGEST_WEIGHT, neginf=-LARGEST_WEIGHT)
    values.clamp_(-LARGEST_WEIGHT, LARGEST_WEIGHT)


def _check_same_shapes(given: dict[str, Tensor], mine: dict[str, Tensor]) -> None:
    """Refuse other names or shapes: Adam accepts any moments, and none, silently, and would start again from zero."""
    for name in sorted(given.keys() | mine.keys()):
        has, needs = (None if state.get(name) is None else tuple(state[name].shape) for state in (given, mine))
        if has != needs:
            raise CheckpointError(
                f"the checkpoint does not fit the network: {name} has shape={has}, the network needs shape={needs} "
                "(None: there is no such tensor); restore the checkpoint from a copy, or start a new run"
            )

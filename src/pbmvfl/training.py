"""What party and server networks share: optimisers from the plan, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pbmvfl.errors import CheckpointError
from pbmvfl.plan import OptimizerName, Plan

_MODEL = "model."
_OPTIMIZER = "optimizer."


def build_optimizer(plan: Plan, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The plan's optimiser; the fused forms do one call for all weights, which is what counts for small networks."""
    if plan.optimizer is OptimizerName.ADAM:
        return torch.optim.Adam(parameters, lr=plan.learning_rate, fused=True)
    return torch.optim.SGD(parameters, lr=plan.learning_rate, momentum=plan.momentum, fused=True)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and optimiser moments as flat named tensors: what a checkpoint holds of one role."""
    state = {_MODEL + name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            if value is not None:
                state[f"{_OPTIMIZER}{index}.{name}"] = torch.as_tensor(value).detach().clone().contiguous()
    return state


def load_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Put a checkpointed state back; names and shapes must fit exactly."""
    weights = {name.removeprefix(_MODEL): value for name, value in state.items() if name.startswith(_MODEL)}
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith(_OPTIMIZER):
            index, name = key.removeprefix(_OPTIMIZER).split(".", 1)
            moments.setdefault(int(index), {})[name] = value.clone()
    try:
        model.load_state_dict(weights)
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit the network: {error}") from error

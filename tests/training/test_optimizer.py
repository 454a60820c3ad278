"""Adam's steps are torch.optim's to the bit, and are taken without loading torch's compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pbmvfl.plan.plan import Plan
from pbmvfl.training.optimizer import Trainer

PLAN = Plan.of(num_parties=2, num_samples=64, num_classes=2, optimizer="adam", learning_rate=0.01)


class Mixed(nn.Module):
    """Weights of two types, one of them in another order of memory, and one that is not learned."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.double = nn.Linear(4, 2).double()
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)


def slopes_of(network: nn.Module, step: int) -> list[Tensor]:
    known = torch.Generator().manual_seed(step)
    learned = [each for each in network.parameters() if each.requires_grad]
    return [
        torch.empty_like(each, requires_grad=False).copy_(torch.randn(each.shape, generator=known, dtype=each.dtype))
        for each in learned
    ]


def test_adam_s_steps_are_those_of_torch_to_the_bit() -> None:
    ours = Mixed()
    theirs = copy.deepcopy(ours)
    learned = [each for each in theirs.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=PLAN.learning_rate, fused=True)
    trainer = Trainer(PLAN, ours)
    for step in range(7):
        if step == 4:  # from a checkpoint, as of here
            state = trainer.state()
            ours = Mixed()
            trainer = Trainer(PLAN, ours)
            trainer.load_state(state)
        trainer.step(slopes_of(ours, step))
        for weight, slope in zip(learned, slopes_of(theirs, step), strict=True):
            weight.grad = slope
        optimizer.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    kept = optimizer.state_dict()["state"]
    moments = {f"moment.{index}.{name}": value for index, each in kept.items() for name, value in each.items()}
    found = {name: value for name, value in trainer.state().items() if name.startswith("moment.")}
    assert found.keys() == moments.keys()
    assert all(torch.equal(value, moments[name]) for name, value in found.items())
    assert any((one != other).any() for one, other in zip(Mixed().parameters(), ours.parameters(), strict=True))


def test_training_with_adam_does_not_load_torch_s_compiler(run_process: Callable[..., Any], tmp_path: Path) -> None:
    program = """
import sys, torch
from pbmvfl.plan.plan import Plan
from pbmvfl.training.optimizer import Trainer
plan = Plan.of(num_parties=2, num_samples=64, num_classes=2, optimizer="adam")
network = torch.nn.Linear(3, 2)
trainer = Trainer(plan, network)
trainer.step([torch.ones_like(each) for each in network.parameters()])
print("torch._dynamo" in sys.modules)
"""
    done = run_process(program=program, cwd=tmp_path)
    assert done.stdout.split() == ["False"], done.stderr

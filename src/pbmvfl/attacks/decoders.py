"""Learned decoders: from what was seen of a row to its columns or pixels, by regression on auxiliary rows.

Ridge and kernel ridge regression are fitted, and the better one on held-out auxiliary rows is taken. Neither invents
detail: what a decoder shows is what the seen numbers say about the target on average.

Shape suffixes: N rows, F seen numbers, D target numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
#: Penalties, relative to the mean of the diagonal.
_PENALTIES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1000.0)
#: Widths of the Gaussian kernel, relative to the mean squared distance of two rows.
_WIDTHS = (0.25, 1.0)
#: Rows that a choice is made on, to bound time; the chosen decoder is fitted on up to _MOST_ROWS.
_CHOICE_ROWS, _MOST_ROWS = 1200, 4500


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoded:
    """Decoded targets, and the decoder that was chosen."""

    value_ND: npt.NDArray[np.float64]
    decoder: str


def decode(
    seen_NF: Array,
    target_ND: Array,
    new_NF: Array,
    *,
    seed: int,
    centre_ND: Array | None = None,
    new_centre: Array | None = None,
) -> Decoded:
    """Fit on auxiliary rows and decode others.

    Args:
        seen_NF: What was seen of the auxiliary rows.
        target_ND: Their targets.
        new_NF: What was seen of the rows to decode.
        seed: Of the held-out part.
        centre_ND: The baseline's guess for the auxiliary rows, which is learned from; None: the mean.
        new_centre: The baseline's guess for the rows to decode.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(seen_NF))[:_MOST_ROWS]
    seen_NF, target_ND = seen_NF[order], target_ND[order]
    mean_D = target_ND.mean(0)
    rest_ND = target_ND - (mean_D if centre_ND is None else centre_ND[order])
    base: Array = mean_D if new_centre is None else new_centre
    mean_F, spread_F = seen_NF.mean(0), seen_NF.std(0)
    spread_F = np.where(spread_F > 1e-12, spread_F, 1.0)
    fit, new = (torch.from_numpy((each - mean_F) / spread_F) for each in (seen_NF, new_NF))
    goal = torch.from_numpy(np.asarray(rest_ND, dtype=np.float64))
    few = min(_CHOICE_ROWS, len(fit))
    split = few * 3 // 4
    trials: list[tuple[float, str, float, float]] = []
    for width in (0.0, *_WIDTHS):
        kernel, across = _kernels(fit[:split], fit[split:few], width)
        for penalty in _PENALTIES:
            found = across @ _solved(kernel, goal[:split], penalty)
            trials.append((float((found - goal[split:few]).square().mean()), "", width, penalty))
    _, _, width, penalty = min(trials)
    kernel, across = _kernels(fit, new, width)
    value = (across @ _solved(kernel, goal, penalty)).numpy()
    name = f"kernel ridge, width {width:g}" if width else "ridge"
    return Decoded(value_ND=value + base, decoder=f"{name}, penalty {penalty:g}")


def _kernels(fit: torch.Tensor, new: torch.Tensor, width: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel of the fitted rows, and that of new rows with them; width 0 is the linear kernel."""
    if not width:
        return fit @ fit.T, new @ fit.T
    scale = width * 2 * fit.var(0, correction=0).sum().clamp_min(1e-12)
    return torch.exp(-torch.cdist(fit, fit).square() / scale), torch.exp(-torch.cdist(new, fit).square() / scale)


def _solved(kernel: torch.Tensor, goal: torch.Tensor, penalty: float) -> torch.Tensor:
    raised = kernel + torch.eye(len(kernel), dtype=kernel.dtype) * (penalty * kernel.diagonal().mean() + 1e-9)
    return torch.cholesky_solve(goal, torch.linalg.cholesky(raised))

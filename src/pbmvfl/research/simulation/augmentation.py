"""Rows of an epoch on the device, in the schedule's order, with pictures cropped and flipped before they are split.

A party that holds a quadrant cannot crop the picture alone: the paper augments whole pictures and splits them after
that. Offsets and flips come from the public seed, so every device sees the same pictures.

Shape suffixes: N rows, R rounds of an epoch, B rows of a round, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pbmvfl.crypto.public_streams import public_bits
from pbmvfl.data.vertical import Array

#: A stream of the public seed that nothing else uses.
AUGMENTATION_STREAM = 0x4155
_ROWS_AT_ONCE = 8192


def joined(quadrants: Sequence[Array]) -> Tensor:
    """Join four (N, C, H/2, W/2) quadrants to whole pictures (N, H, W, C)."""
    top, bottom = (np.concatenate(pair, axis=3) for pair in (quadrants[:2], quadrants[2:]))
    whole = np.concatenate([top, bottom], axis=2)
    return torch.from_numpy(np.ascontiguousarray(whole.transpose(0, 2, 3, 1)))


def cut(pictures_NHWC: Tensor) -> list[Tensor]:
    """Split whole pictures into four quadrants (N, H/2, W/2, C): top left, top right, bottom left, bottom right."""
    height, width = pictures_NHWC.shape[1] // 2, pictures_NHWC.shape[2] // 2
    rows, columns = (slice(None, height), slice(height, None)), (slice(None, width), slice(width, None))
    return [pictures_NHWC[:, r, c] for r in rows for c in columns]


def crop_and_flip(pictures_NHWC: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Move every picture by up to an eighth of its side (black comes in) and mirror it or not."""
    count, height, width, _ = pictures_NHWC.shape
    device = pictures_NHWC.device
    pad = max(1, height // 8)
    words = public_bits(count, seed=seed, stream=AUGMENTATION_STREAM, index=epoch)
    choices = np.stack([words % (2 * pad + 1), (words >> np.uint64(20)) % (2 * pad + 1), words >> np.uint64(63)])
    down_N, right_N, flip_N = torch.from_numpy(choices.astype(np.int64)).to(device)
    result = torch.empty_like(pictures_NHWC)
    y_H, x_W = torch.arange(height, device=device), torch.arange(width, device=device)
    for first in range(0, count, _ROWS_AT_ONCE):
        piece = slice(first, first + _ROWS_AT_ONCE)
        padded = torch.nn.functional.pad(pictures_NHWC[piece], (0, 0, pad, pad, pad, pad))
        x_NW = torch.where(flip_N[piece, None].bool(), width - 1 - x_W, x_W) + right_N[piece, None]
        y_NH = y_H + down_N[piece, None]
        rows = torch.arange(len(padded), device=device)[:, None, None]
        result[piece] = padded[rows, y_NH[:, :, None], x_NW[:, None, :]]
    return result


class Rows:
    """One split on the device, and the buffers of an epoch.

    `batches[m]` is (R, B, ...) of party m and `labels` (R, B); rows that do not fill a round are in `rest`. The
    addresses never change, so a captured graph may read them.
    """

    def __init__(
        self, parts: Sequence[Array], labels: Array, *, batch_size: int, device: torch.device, augment: bool = False
    ) -> None:
        self._augment = augment
        self._is_picture = parts[0].ndim == 4
        if augment:
            self._whole: list[Tensor] = [joined(parts).to(device)]
        else:
            tensors = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
            self._whole = [(t.permute(0, 2, 3, 1).contiguous() if self._is_picture else t).to(device) for t in tensors]
        self._labels = torch.from_numpy(labels).to(device)
        self._device = device
        count = len(labels)
        self.batch_size = min(batch_size, count)
        self.rounds, self.rest_rows = divmod(count, self.batch_size)
        shapes = [part.shape[1:] for part in (cut(self._whole[0]) if augment else self._whole)]
        kind = self._whole[0].dtype
        self.batches = [torch.empty((self.rounds, self.batch_size, *s), dtype=kind, device=device) for s in shapes]
        self.labels = torch.empty((self.rounds, self.batch_size), dtype=torch.int64, device=device)
        self.rest = [torch.empty((1, self.rest_rows, *s), dtype=kind, device=device) for s in shapes]
        self.rest_labels = torch.empty((1, self.rest_rows), dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        return len(self._labels)

    def fill(self, order: Array | None = None, *, seed: int = 0, epoch: int = 0) -> None:
        """Write an epoch: rows in this order (their own, if None), with fresh augmentation."""
        rows = torch.arange(self.count) if order is None else torch.from_numpy(order)
        rows = rows.to(self._device)
        parts = self._whole
        if self._augment:
            parts = cut(crop_and_flip(self._whole[0], seed=seed, epoch=epoch))
        full = self.rounds * self.batch_size
        for part, batch, rest in zip(parts, self.batches, self.rest, strict=True):
            batch.copy_(part.index_select(0, rows[:full]).view(batch.shape))
            rest.copy_(part.index_select(0, rows[full:]).view(rest.shape))
        self.labels.copy_(self._labels.index_select(0, rows[:full]).view(self.labels.shape))
        self.rest_labels.copy_(self._labels.index_select(0, rows[full:]).view(self.rest_labels.shape))

    def as_input(self, batch: Tensor) -> Tensor:
        """Return an encoder's input: pictures as (B, C, H, W) in channels-last memory, as the buffers have them."""
        return batch.permute(0, 3, 1, 2) if self._is_picture else batch

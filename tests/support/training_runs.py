"""Runs for the account, from the few numbers that tests think in: rows, batches, epochs and what one use releases."""

from __future__ import annotations

from pbmvfl.privacy.accounting import Activity, TrainingRun
from pbmvfl.privacy.events import NoisyUpdate, PlainUpdate, ReleaseEvent


def training_run(
    *,
    event: ReleaseEvent,
    num_samples: int = 1000,
    batch_size: int = 100,
    num_epochs: int = 1,
    update: NoisyUpdate | None = None,
    extra_row_releases: int = 0,
    extra_releases: int = 0,
    couples_rows: bool = False,
) -> TrainingRun:
    """Every row once in an epoch, with its update; besides, releases of the same rows without one."""
    first_batch = min(batch_size, num_samples)
    joint = Activity(
        split="train",
        release=event,
        update=update or PlainUpdate(),
        row_releases=num_epochs,
        row_updates=num_epochs,
        total_releases=num_epochs * num_samples,
    )
    extra = Activity(
        split="train",
        release=event,
        update=None,
        row_releases=extra_row_releases,
        row_updates=0,
        total_releases=extra_releases,
    )
    return TrainingRun(
        activities=(joint, extra) if extra_row_releases or extra_releases else (joint,),
        num_parties=event.num_parties,
        first_batch=first_batch,
        rows_together=first_batch if couples_rows else 1,
    )

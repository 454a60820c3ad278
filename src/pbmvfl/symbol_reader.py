"""How the server reads votes that are symbols: by every party's noisy counts, and by what randomised response does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.krr import RandomisedSymbols
from pbmvfl.plan import Plan
from pbmvfl.symbol_tables import class_scores, decode_table, log_prior, sent_log_likelihoods, symbol_shares


class SymbolReader:
    """Class scores from everybody's symbols; all of it computed from what was released."""

    def __init__(self, plan: Plan, tables: Sequence[bytes | memoryview], train_labels: npt.NDArray[np.int64]) -> None:
        """`tables` are the parties' answers to the round of counts."""
        if not isinstance(plan.prediction, RandomisedSymbols):
            raise PlanError(f"vote={plan.vote.kind}: symbols are read from mechanism=krr alone")
        self._payload = plan.prediction.payload
        rows_of_class_K = np.bincount(train_labels, minlength=plan.num_classes)
        self._log_prior_K = log_prior(rows_of_class_K)
        self._tables_MKS = [
            sent_log_likelihoods(
                symbol_shares(decode_table(table, plan.num_classes), rows_of_class_K, plan.table_noise),
                plan.prediction.kept,
            )
            for table in tables
        ]

    def scores(self, payloads: Sequence[bytes | memoryview], rows: int) -> npt.NDArray[np.float32]:
        """ln P(class | everybody's symbols) of each row, (B, K)."""
        return class_scores(self._payload.each(payloads, rows), self._tables_MKS, self._log_prior_K)

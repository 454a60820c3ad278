"""How the server reads votes by every party's noisy counts: symbols one by one, or ballots as noisy sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import PolyaLaplace, RandomisedSymbols
from pbmvfl.mechanisms.vote_tables import ballot_scores, class_scores, log_prior, sent_log_likelihoods, symbol_shares
from pbmvfl.plan.plan import Plan


class VoteReader:
    """Class scores from everybody's votes; all of it computed from what was released."""

    def __init__(
        self, plan: Plan, tables_MKS: Sequence[npt.NDArray[np.int64]], rows_of_class_K: npt.NDArray[np.int64]
    ) -> None:
        """`tables_MKS` are the parties' noisy counts, as `decode_table` gives them."""
        mechanism = plan.prediction
        if not isinstance(mechanism, RandomisedSymbols | PolyaLaplace):
            raise PlanError(f"vote={plan.vote.kind}: counts read votes of mechanism=krr and mechanism=laplace alone")
        self._mechanism = mechanism
        symbols = plan.vote.counted(plan.num_classes)
        for party, table_KS in enumerate(tables_MKS):
            if table_KS.shape != (plan.num_classes, symbols):
                raise PlanError(
                    f"party={party}: its counts have shape={table_KS.shape}, vote={plan.vote.kind} makes "
                    f"{(plan.num_classes, symbols)}"
                )
        self.tables_MKS = tuple(tables_MKS)
        self._log_prior_K = log_prior(rows_of_class_K)
        self._shares_MKS = [symbol_shares(table_KS, rows_of_class_K, plan.table_noise) for table_KS in tables_MKS]

    def scores(self, payloads: Sequence[bytes | memoryview], rows: int) -> npt.NDArray[np.float32]:
        """ln P(class | everybody's votes) of each row, (B, K)."""
        mechanism = self._mechanism
        if isinstance(mechanism, RandomisedSymbols):
            tables_MKS = [sent_log_likelihoods(shares_KS, mechanism.kept) for shares_KS in self._shares_MKS]
            return class_scores(mechanism.payload.each(payloads, rows), tables_MKS, self._log_prior_K)
        shape = (rows, mechanism.embedding_dim)
        ballots_BK = mechanism.estimate(mechanism.payload.total(payloads, shape[0] * shape[1])).reshape(shape)
        return ballot_scores(ballots_BK / mechanism.bound, self._shares_MKS, mechanism.scale, self._log_prior_K)

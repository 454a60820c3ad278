"""What a party's owner accepts, asked before there is a party."""

from __future__ import annotations

from dataclasses import dataclass

from pbmvfl.errors import PolicyError
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import Evaluation


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Conditions of one party's owner on a plan. The default accepts whatever a simulation may run."""

    #: The sum hides a party among the others: with fewer than this it hides too little.
    smallest_num_parties: int = 2
    #: Names of mechanisms; None for any.
    mechanisms: frozenset[str] | None = None
    #: Whether only sums may be readable.
    needs_secure_aggregation: bool = False
    #: Whether a simulator may look at exact sums. A deployment has no such door.
    allows_exact_metrics: bool = True

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not meet the conditions."""
        if plan.num_parties < self.smallest_num_parties:
            raise PolicyError(
                f"num_parties={plan.num_parties}: the policy permits {self.smallest_num_parties} or more; "
                "find more parties, or change the policy"
            )
        for release in (plan.release, plan.prediction or plan.release):
            if self.mechanisms is not None and release.name not in self.mechanisms:
                raise PolicyError(
                    f"mechanism={release.name}: the policy permits {', '.join(sorted(self.mechanisms))}; plan with one "
                    "of them, or change the policy"
                )
            if self.needs_secure_aggregation and not release.secure_aggregation:
                raise PolicyError(
                    "secure_aggregation=False: the policy permits only sums to be readable; plan with "
                    "secure_aggregation=True, or change the policy"
                )
        if not self.allows_exact_metrics and plan.evaluation is Evaluation.SIMULATOR:
            raise PolicyError(
                "evaluation=simulator: the policy permits nobody to look at exact sums; plan with evaluation=none or "
                "evaluation=released, or change the policy"
            )

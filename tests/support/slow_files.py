"""Files of tests that `make test-fast` leaves out: they start processes, train, search, or explore many states.

A file is listed when its tests take about three seconds of a core or more. Longest first: a test run begins with them,
so that its last file is a short one. Every package keeps quick tests. Files that wait for other processes and for
timers more than they work are named apart: `in_turn` has two that work after each of them, so that cores are not idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

_TESTS = Path(__file__).parents[1]
#: Patterns of paths below `tests/`: what waits, and all that is slow.
WAITING = (
    "system/test_deployment_*.py",
    "deploy/nvflare/test_guard.py",
    "deploy/nvflare/test_processes.py",
    "deploy/nvflare/test_lead_session.py",
    "federation/test_transports.py",
    "federation/test_party_processes.py",
    "deploy/link/*.py",
    "deploy/nvflare/*.py",
)
SLOW_FILES = (
    *WAITING,
    "cli/test_privacy.py",
    "ledger/test_kills.py",
    "system/test_notebooks.py",
    "cli/test_studio.py",
    "system/test_*_state_machine.py",
    "research/simulation/*.py",
    "federation/test_estimator.py",
    "cli/test_train.py",
    "privacy/test_looseness.py",
    "plan/test_search.py",
    "federation/test_resume.py",
    "federation/test_checkpoints.py",
    "system/test_transcripts.py",
    "mechanisms/test_toy_mechanism.py",
    "system/test_adversary.py",
    "privacy/test_renyi.py",
    "system/test_full_disk.py",
    "mechanisms/test_conformance.py",
    "mechanisms/test_laplace.py",
    "cli/test_budgets.py",
    "training/test_fusion.py",
    "frozen/test_plans.py",
    "privacy/test_table.py",
    "privacy/test_advantage.py",
    "system/test_examples.py",
    "system/test_answers_hide_changes.py",
    "federation/test_learning.py",
    "plan/test_algorithm.py",
    "report/test_page.py",
    "system/test_paper_runs.py",
    "system/test_words_follow_draws.py",
    "ledger/test_exact_permission.py",
    "privacy/test_conversion.py",
    "system/test_malicious_label_holder.py",
    "system/test_defaults.py",
    "protocol/test_local_rounds.py",
    "privacy/test_events.py",
    "cli/test_federation.py",
    "system/test_*_benchmark.py",
    "system/test_docs_*.py",
    "training/test_noisy.py",
    "system/test_local_worlds.py",
    "federation/test_rows_pay_once.py",
    "system/test_one_release_one_charge.py",
    "cli/test_attack.py",
    "audit/test_faults.py",
    "ledger/test_unnamed_rows.py",
    "ledger/test_renamed_parties.py",
    "plan/test_toy_round_kind.py",
    "ledger/test_forecast.py",
    "ledger/test_row_by_row.py",
    "cli/test_audit.py",
    "training/test_correlated.py",
    "ledger/test_session_opening.py",
    "federation/test_metrics_summary.py",
    "federation/test_predictions_charged.py",
    "system/test_equivalence.py",
    "federation/test_release_log.py",
    "federation/test_drawn_labels.py",
    "federation/test_label_runs.py",
    "ledger/test_foreign_weights.py",
    "system/test_label_*.py",
    "system/test_network_study.py",
    "deploy/job/*.py",
    "deploy/site/test_supervision.py",
    "deploy/alignment/test_runner.py",
)


@cache  # once for each file, not for each of its tests
def place(path: Path) -> int:
    """Return the place of a file in the list, from 0; the length of the list if it is not slow."""
    own = path.relative_to(_TESTS)
    return next((i for i, pattern in enumerate(SLOW_FILES) if own.match(pattern)), len(SLOW_FILES))


def in_turn(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files in the order of their places, two that do not wait after each that does."""
    ordered = sorted(paths, key=place)
    waiting = [path for path in ordered if place(path) < len(WAITING)]
    working = iter(ordered[len(waiting) :])
    for path in waiting:
        yield path
        yield from islice(working, 2)
    yield from working

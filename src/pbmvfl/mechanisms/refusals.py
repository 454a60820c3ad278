"""What the mechanisms refuse, in the same words."""

from __future__ import annotations

from pbmvfl.errors import NonFiniteError


def not_finite() -> NonFiniteError:
    """For an embedding that holds NaN or infinity. Earlier rounds of the run may have been released."""
    return NonFiniteError(
        "the embedding holds NaN or infinity, so this round was not released; start a new run with a smaller learning "
        "rate, or check the columns"
    )

"""Renyi orders at which every curve is computed.

The best order for a total divergence rho and a delta is near 1 + sqrt(ln(1/delta) / rho), so the grid starts in steps
of .01 and then keeps the spacing proportional to order - 1: a miss by half a step costs the same share everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]

_STEP = 0.01
_FINE_UNTIL = 1.25
_LARGEST = 2048.0


def _grid() -> tuple[float, ...]:
    orders = [1 + _STEP * i for i in range(1, round((_FINE_UNTIL - 1) / _STEP) + 1)]
    while orders[-1] < _LARGEST:
        orders.append(1 + (orders[-1] - 1) * (1 + _STEP / (_FINE_UNTIL - 1)))
    return tuple(round(order, 6) for order in orders)


#: Widening upwards from 1.01; a tuple, so that it can key a cache.
ORDERS: tuple[float, ...] = _grid()

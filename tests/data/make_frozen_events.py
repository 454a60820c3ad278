"""Writes frozen-events.json: what noisy updates cost. Run it to add an event, never to change the price of one."""

import json
import math
from pathlib import Path

from pbmvfl.privacy.composition import GaussianLosses
from pbmvfl.privacy.events import DiscreteGaussianUpdate, NoisyUpdate, RoundedGaussianSum, UpdateEvent

ORDERS = (1.5, 2.0, 8.25, 64.0)
EVENTS: tuple[UpdateEvent, ...] = (
    NoisyUpdate(clip_norm=0.5, noise_multiplier=6.3),
    DiscreteGaussianUpdate(clip_norm=0.5, noise_multiplier=6.3),
    RoundedGaussianSum(clip_norm=0.5, noise_multiplier=6.3),
    RoundedGaussianSum(clip_norm=1.0, noise_multiplier=5.0, diameter=math.sqrt(2)),
)

frozen = []
for event in EVENTS:
    losses = event.losses()
    frozen.append(
        {
            "event": event.to_dict(),
            "orders": ORDERS,
            "rdp": event.rdp(ORDERS).tolist(),
            "shift_of_losses": losses.shift if isinstance(losses, GaussianLosses) else None,
        }
    )
(Path(__file__).parent / "frozen-events.json").write_text(json.dumps(frozen, indent=1) + "\n")

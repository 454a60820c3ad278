"""The version of what travels and of what a plan means: it is in every header, every key and every plan's hash."""

from __future__ import annotations

#: Changes whenever the bytes on the wire or the meaning of a plan change.
PROTOCOL_VERSION = 2

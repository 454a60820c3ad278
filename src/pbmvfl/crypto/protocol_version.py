"""Version of the wire format and of the meaning of a plan. It is in every header, every key and every plan's hash."""

from __future__ import annotations

#: Changes whenever the bytes on the wire or the meaning of a plan change.
PROTOCOL_VERSION = 2

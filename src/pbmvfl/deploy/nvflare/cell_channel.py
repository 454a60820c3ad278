"""One job's endpoint on NVFlare's cell: bytes to and from named cells, and nothing else.

Every message is one-way, so that NVFlare attributes no reply: a process that waits for an NVFlare reply can be sent a
RETURN by another site, in the name of a third. Incoming messages are checked before NVFlare decodes them: the sender
chooses the encoding, may request an exchange of certificates, and may name an address to dial.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any

from nvflare.fuel.f3.cellnet.defs import Encoding, MessageHeaderKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

from pbmvfl.deploy.link import connection
from pbmvfl.deploy.nvflare.guard import LINK_CHANNEL

CHANNEL, TOPIC = LINK_CHANNEL, "link"
#: Seconds after which a missing answer is probed for.
AGAIN_AFTER = 2.0
#: Body of a PROBE: the question's number.
NUMBER = struct.Struct(">Q")
#: Body of a STATE: the last answered question, and the question in work, 0 for none.
STATE = struct.Struct(">QQ")
#: Largest number of warnings about dropped messages: other sites must not fill the owner's log.
_MOST_WARNINGS = 20

_log = logging.getLogger(__name__)


class Kind(Enum):
    """Kind of a message: its first byte. Only questions and answers are authenticated; see `cell.py` for the others."""

    HELLO = b"H"
    CHALLENGE = b"C"
    JOIN = b"J"
    REFUSED = b"R"
    QUESTION = b"Q"
    PROBE = b"P"
    STATE = b"S"
    ANSWER = b"A"
    BYE = b"X"


#: Called in NVFlare's threads, with the sender's cell; must return soon.
OnMessage = Callable[[str, Kind, bytes], None]


class CellEndpoint:
    """Channel of a cell. Only messages of `peers` are accepted."""

    def __init__(
        self, core_cell: Any, *, peers: Collection[str], on_message: OnMessage, limit: int = connection.LIMIT
    ) -> None:
        self._cell, self._peers, self._on_message, self._limit = core_cell, frozenset(peers), on_message, limit + 1
        self._warnings = 0
        self._closed = False
        core_cell.add_incoming_filter(CHANNEL, TOPIC, self._guard)
        core_cell.register_request_cb(CHANNEL, TOPIC, self._received)

    def send(self, target: str, kind: Kind, body: bytes = b"") -> None:
        """Send without waiting. A message that cannot be sent now is lost: the receiver of the answer asks again."""
        if self._closed:
            return
        try:
            self._cell.fire_and_forget(CHANNEL, TOPIC, target, Message(None, kind.value + body), optional=True)
        except Exception as error:  # the cell is about to stop, or has stopped
            _log.debug("not sent to %s: %s", target, error)

    def dropped(self, words: str) -> None:
        """Warn in the owner's log about a message without effect, a bounded number of times."""
        if self._closed or self._warnings >= _MOST_WARNINGS:
            return
        self._warnings += 1
        last = "; no more of these are written" if self._warnings == _MOST_WARNINGS else ""
        _log.warning("dropped: %s%s", words, last)

    def close(self) -> None:
        """Send and accept nothing from now on."""
        self._closed = True

    # --- in NVFlare's threads ---

    def _guard(self, message: Message) -> Message | None:
        """Check a message before it is decoded. A reply returned here ends the message, and is never sent."""
        fault = self._envelope_fault(message)
        if not fault:
            return self._filters_of_all_channels(message)
        self._warn(message, fault)
        return make_reply(ReturnCode.INVALID_REQUEST)

    def _received(self, message: Message) -> None:
        """Handle a message that passed the filter. All is checked again: messages in NVFlare's bulks skip filters."""
        fault = self._origin_fault(message) or self._content_fault(message.payload)
        if not fault:
            payload = bytes(message.payload)
            try:
                kind = Kind(payload[:1])
            except ValueError:
                fault = "is of no known kind"
            else:
                if not self._closed:
                    self._on_message(message.get_header(MessageHeaderKey.ORIGIN), kind, payload[1:])
                return
        self._warn(message, fault)

    def _envelope_fault(self, message: Message) -> str:
        encoding = message.get_header(MessageHeaderKey.PAYLOAD_ENCODING)
        if encoding != Encoding.BYTES:
            return f"is encoded as {str(encoding)[:20]!r}; permitted: bytes"
        for key in (MessageHeaderKey.SECURE, MessageHeaderKey.ENCRYPTED, MessageHeaderKey.CONN_URL):
            if message.get_header(key):
                return f"asks for {key.removeprefix('cn__')}"
        return self._origin_fault(message) or self._content_fault(message.payload)

    def _origin_fault(self, message: Message) -> str:
        if self._closed:
            return "came after the end"
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        if not isinstance(origin, str) or origin not in self._peers:
            return f"has no part in this; permitted: {', '.join(sorted(self._peers))}"
        kind = message.get_header(MessageHeaderKey.MSG_TYPE)
        return "" if kind == MessageType.REQ else f"is a {str(kind)[:20]!r}; permitted: {MessageType.REQ}"

    def _content_fault(self, payload: Any) -> str:
        if not isinstance(payload, bytes | bytearray | memoryview):
            return "has no bytes"
        if len(payload) > self._limit:
            return f"has {len(payload):,} bytes; permitted: at most {self._limit:,}"
        return ""

    def _filters_of_all_channels(self, message: Message) -> Message | None:
        """Run the filters of all channels, which check tokens; this channel's own filter would replace them."""
        for each in self._cell.in_filter_reg.find("*", "*") or ():
            reply: Message | None = each.cb(message, *each.args, **each.kwargs)
            if reply is not None:
                return reply
        return None

    def _warn(self, message: Message, fault: str) -> None:
        origin = str(message.get_header(MessageHeaderKey.ORIGIN))[:120]
        self.dropped(f"a message of cell {origin!r} {fault}")


def printable_text(body: bytes) -> str:
    """Return the other side's text, bounded and printable."""
    return "".join(each for each in body[:400].decode(errors="replace") if each.isprintable())

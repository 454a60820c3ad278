"""Every error that pbmvfl raises on purpose, as one tree.

Messages follow one form: what was given (name=value), what is permitted, and what to do about it.
"""

from __future__ import annotations


class PbmvflError(Exception):
    """Base of every deliberate error: catch this one to catch them all."""


class PlanError(PbmvflError, ValueError):
    """A number of the plan is outside its permitted range, or two of them contradict each other."""


class DataError(PbmvflError, ValueError):
    """The data cannot be used as given: unknown set, missing or repeated column, NaN, missing label."""


class EncoderError(PbmvflError, ValueError):
    """An encoder that cannot be used: its output can leave [-C, C], or has the wrong shape."""


class NonFiniteError(PbmvflError, ValueError):
    """NaN or infinity where a number must be; it is never turned into a probability."""


class RunFolderError(PbmvflError):
    """The run folder exists already, is not one, or cannot be written."""


class CheckpointError(PbmvflError):
    """A checkpoint is missing, damaged, or belongs to another plan."""


class ProtocolError(PbmvflError):
    """A message that the state machine refuses. Its state is unchanged."""


class TruncatedMessage(ProtocolError):
    """Shorter or longer than its header or the plan says."""


class WrongVersion(ProtocolError):
    """Not a pbmvfl message, or one of another protocol version."""


class WrongSession(ProtocolError):
    """A message of another run or session."""


class WrongPlan(ProtocolError):
    """The sender follows another plan."""


class WrongSender(ProtocolError):
    """A message from a role that may not send it, a party index that does not exist, or one in another's name."""


class NonFiniteMessage(NonFiniteError, ProtocolError):
    """NaN or infinity in a message: the sender must not have sent it, and nothing of it was used."""


class OutOfOrder(ProtocolError):
    """A valid message at the wrong time."""


class DuplicateMessage(ProtocolError):
    """A message that was handled already. Answer a retry with `resend`, which repeats the same bytes."""


class IdentityError(ProtocolError):
    """A key that its pinned identity did not sign: somebody between the parties swapped it."""


class LedgerError(PbmvflError):
    """A ledger that cannot be used: in use by another process, damaged, or asked for something it does not have."""


class BudgetExceeded(PbmvflError):
    """A release that would cross a limit that the party's owner set. Nothing was sent."""

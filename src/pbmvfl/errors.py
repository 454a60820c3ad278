"""Every error that pbmvfl raises on purpose, as one tree.

    PbmvflError
    ├── PlanError                a public number out of range, or two that contradict each other
    ├── DataError                data that cannot be used as given
    ├── EncoderError             a network for which the privacy account would not hold
    ├── NonFiniteError           NaN or infinity where a number must be
    │   └── NonFiniteMessage     the same in a message (also a ProtocolError)
    ├── PolicyError              a plan that a party's owner does not accept
    ├── PolicyFileError          a policy.toml that cannot be used; for its owner alone
    ├── FederationError          files of a federation that are missing, damaged, or contradict each other
    │   └── OrderError           a job that is not of the form that sites accept
    ├── AlignmentError           rows of different organisations that cannot be put in one order
    ├── RunFolderError           a run folder that exists, is none, or cannot be written
    ├── WriteError               a file that could not be written; the one before it is whole (also an OSError)
    ├── CheckpointError          a checkpoint that is missing, damaged, or another run's
    ├── ModelError               a part of a saved model that is missing, damaged or another's, or rows that do not fit
    ├── LedgerError              a ledger that cannot be used
    ├── AnswersError             stored answers that cannot be used
    ├── BudgetExceeded           a release that would cross a limit of the party's owner
    ├── TransportError           a message could not be carried
    │   ├── PartyLost            a party did not answer: its process ended, or it took too long
    │   └── LinkError            a link between a party and the server that is cut, or is not who it says it is
    └── ProtocolError            a message that a state machine refuses; its state is unchanged
        ├── TruncatedMessage     shorter or longer than its header or the plan says
        ├── WrongVersion         not a pbmvfl message, or one of another version
        ├── WrongSession         of another run or session
        ├── WrongPlan            the sender follows another plan
        ├── WrongSender          from a role that may not send it, or in another's name
        ├── OutOfOrder           a valid message at the wrong time
        ├── DuplicateMessage     a second answer of one party
        ├── IdentityError        a key that its pinned identity did not sign
        └── PartyRefused         a party said no, in public words

Messages follow one form: what was given (name=value), what is permitted, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping


class PbmvflError(Exception):
    """Base of every deliberate error: catch this one to catch them all."""


class PlanError(PbmvflError, ValueError):
    """A number of the plan is outside its permitted range, or two of them contradict each other."""


class DataError(PbmvflError, ValueError):
    """The data cannot be used as given: unknown set, missing or repeated column, NaN, missing label."""

    #: Every fault, a sentence each, where a schema or a table was checked as a whole.
    faults: tuple[str, ...] = ()


class EncoderError(PbmvflError, ValueError):
    """An encoder that cannot be used: its output can leave [-C, C], or has the wrong shape."""


class NonFiniteError(PbmvflError, ValueError):
    """NaN or infinity where a number must be; it is never turned into a probability."""


class PolicyError(PbmvflError):
    """A plan that a party's owner does not accept; checked before a party exists."""


class PolicyFileError(PbmvflError):
    """A policy.toml that cannot be used, or that permits more than the ledger does. Its message is private."""


class FederationError(PbmvflError):
    """Files of a federation that are missing, damaged, or contradict each other: federation.toml, keys, kits, pins."""


class OrderError(FederationError):
    """A job that is not of the form that sites accept. Its words are public."""


class AlignmentError(PbmvflError):
    """Rows that cannot be put in one order: repeated or missing ids, none in common, or another order elsewhere."""


class RunFolderError(PbmvflError):
    """The run folder exists already, is not one, or cannot be written."""


class WriteError(PbmvflError, OSError):
    """A file could not be written: the disk is full, or it is not permitted. The file before it is whole."""


class CheckpointError(PbmvflError):
    """A checkpoint is missing, damaged, or belongs to another plan."""


class ModelError(PbmvflError):
    """A saved model that cannot be used: a part is missing, damaged, of another model or version; or other columns."""


class LedgerError(PbmvflError):
    """A ledger that cannot be used: in use by another process, damaged, or without what was requested."""


class AnswersError(PbmvflError):
    """Stored answers that cannot be used: damaged, in use by another process, or not where they should be."""


class BudgetExceeded(PbmvflError):
    """A release that would cross a limit that the party's owner set. Nothing was sent."""


class TransportError(PbmvflError):
    """A message that could not be carried. What the state machines did is not affected."""


class PartyLost(TransportError):
    """Parties that did not answer; `reasons` has the words for each of them by its index."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        named = "; ".join(f"party={party}: {reason}" for party, reason in sorted(self.reasons.items()))
        super().__init__(f"{named}; a run with checkpoints can be continued from its last one")


class LinkError(TransportError):
    """A link that is cut for longer than its patience, closed, or whose other end is not who it should be."""


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
    """A second answer of one party to one message."""


class IdentityError(ProtocolError):
    """A key that its pinned identity did not sign: it was swapped between the parties."""


class PartyRefused(ProtocolError):
    """A party said no. What it says is public: a code, and words that hold no path and no private value."""

    def __init__(self, party: int, code: int, words: str) -> None:
        self.party, self.code, self.words = party, code, words
        super().__init__(f"party={party} refused: {words}")

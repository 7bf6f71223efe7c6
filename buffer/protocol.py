"""Messages between `BufferClient` and `BufferService`; a body, if any, is an Arrow IPC stream.

A client sends Hello first. One that has not, or asks what `ASKED_BY` does not give its role, is refused. Requests are
idempotent: each names what it is about (an epoch and sequence number, a lease, a step).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, ClassVar

import msgspec

from buffer.lengths import LengthFidelity
from common.rpc.messages import RETRY as RETRY
from common.rpc.messages import ROLES, Count, Message, Protocol, Role
from common.rpc.messages import Done as Done
from common.rpc.messages import Refused as Refused

Number = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A time span; neither NaN nor infinite."""


# --- requests -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a client. Opens a new epoch of an actor, which fences its older ones."""

    role: Role
    name: str
    session: str
    """Random per client process: the same Hello sent twice opens one epoch. All three are those of the `Asker`."""


class LeaseRequest(Message, frozen=True):
    """An actor asks for up to `max_groups` groups of K samples to generate."""

    actor: str
    epoch: Count
    request_number: Count
    """Counts up per epoch; the same number asked again returns the same leases."""
    max_groups: Count
    lane: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """The pool of the actor; those of a lane are of one speed."""
    token_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """Seconds for a token of each sample that the actor has room for; 0: not known."""
    wants_lengths: bool = False
    """Predictions of lengths are to come with the leases."""


class Push(Message, frozen=True):
    """Completed trajectories; the body is an Arrow IPC stream of them."""

    is_bulk: ClassVar[bool] = True

    actor: str
    epoch: Count


class GiveUp(Message, frozen=True):
    """Samples of a lease that will not come: generation or reward failed."""

    actor: str
    epoch: Count
    lease_id: Count
    attempt: Count
    sample_indices: list[Count]
    reason: str


class HandOn(Message, frozen=True):
    """Samples of a lease that the actor leaves unfinished; the body holds what it has of them, as trajectories with
    finish_reason `schema.HANDED_ON`. Others start anew, or where they started before.
    """

    is_bulk: ClassVar[bool] = True

    actor: str
    epoch: Count
    lease_id: Count
    attempt: Count
    sample_indices: list[Count]
    goes_on: bool = False
    """The actor continues: what there is so far is only kept, in case it dies."""


class Renew(Message, frozen=True):
    """The actor still works on these leases."""

    actor: str
    epoch: Count
    lease_ids: list[Count]


class DrawRequest(Message, frozen=True):
    """The learner asks for the groups of step `step`, which begins at `version`."""

    step: Count
    """Steps are counted from 1: step n makes n finished steps."""
    version: Count
    """Optimizer steps taken when this step begins."""
    incarnation: Number
    num_groups: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    wait_s: Seconds
    """The service answers at the latest after this time, ready or not."""
    allowed_lag: Count | None = None
    """From now on new groups are leased as if this were `max_lag`, where it is less; None: by `max_lag` itself."""


class WriteScores(Message, frozen=True):
    """Reference log-probabilities of trajectories; the body is an Arrow IPC stream of `schema.SCORES`."""


class VisitsRequest(Message, frozen=True):
    """Ask what is known of the lengths of answers, of the prompts that groups were seen of last."""


class Expect(Message, frozen=True):
    """Predictions of the lengths of prompts without a group; the body has rows of `schema.EXPECTED`, for each prompt
    from `first` on.
    """

    is_bulk: ClassVar[bool] = True

    first: Count
    variance: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    """Of a prompt's own part, around the prediction."""


class StepFinished(Message, frozen=True):
    """Step `step` is done and the learner is now at `version`: one more for each update that was applied."""

    step: Count
    version: Count
    incarnation: Number
    skipped: bool = False
    """No update was applied: the version is that at which the step began."""


class Published(Message, frozen=True):
    """This version can be pulled from the weight store."""

    incarnation: Number
    version: Count


class CheckpointDurable(Message, frozen=True):
    """Uses up to and including `step` are final."""

    step: Count
    incarnation: Number


class BeginIncarnation(Message, frozen=True):
    """A learner starts (or restarts from a checkpoint) at `version`, having finished `step` steps."""

    session: str
    version: Count
    step: Count


class Drain(Message, frozen=True):
    """Grant no further leases until another learner begins."""


class StatusRequest(Message, frozen=True):
    """Ask for the ledger and what is in flight."""


# --- replies --------------------------------------------------------------------------------------


class Credit(msgspec.Struct, frozen=True):
    """How much a client may have sent without an acknowledgement: it bounds the memory of both sides."""

    rows: int = 1024
    size_bytes: int = 16 * 2**20


class Welcome(Message, frozen=True):
    """Answers `Hello`."""

    epoch: int
    """Counts the processes of this name, from 1."""
    credit: Credit = Credit()


class Lease(msgspec.Struct, frozen=True):
    """Permission to generate samples of one group."""

    lease_id: int
    attempt: int
    group_id: int
    prompt_id: int
    sample_indices: list[int]
    """The samples still missing: all K of them at the first attempt."""
    min_version: int
    """No request of this lease starts below this version."""
    timeout_s: float
    prefixes: list[int] = []
    """Samples with partial rollouts."""
    usual_tokens: float = 0.0
    """Predicted geometric mean of the tokens of its prompt's completions; 0: not known, or not asked for."""


class LeaseGrant(Message, frozen=True):
    """Answer to LeaseRequest; without leases while admission is closed. The body has a row for each of the `prefixes`
    of each lease, in order.
    """

    leases: list[Lease]
    newest: tuple[int, int]
    draining: bool
    hand_on_at: Count = 0
    """Tokens at which a sample is to be handed on, because it would be late and a faster lane exists; 0: never."""
    is_near_bound: bool = False
    """Admission was closed a short time ago, so the actor should lease no more than it needs."""


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """Reports what became of one pushed trajectory."""

    seq: int
    outcome: str
    """'committed', 'duplicate', 'late', 'fenced' or 'quarantined'."""
    reason: str = ""


class PushReply(Message, frozen=True):
    """Answer to Push, sent after the transaction is on disk."""

    committed: list[tuple[int, int]]
    """First and last sequence number of each run of trajectories that were committed."""
    others: list[RowResult]
    credit: Credit | None = None

    @property
    def results(self) -> list[RowResult]:
        """What became of each trajectory, by sequence number."""
        runs = [RowResult(seq, "committed") for first, last in self.committed for seq in range(first, last + 1)]
        return sorted([*runs, *self.others], key=attrgetter("seq"))


class RenewReply(Message, frozen=True):
    """Answer to Renew: these leases are no longer the actor's."""

    lost: list[int]


class DrawReply(Message, frozen=True):
    """Answer to DrawRequest. Where `ready`, the body holds the trajectories in the order of `group_ids`."""

    ready: bool
    step: int
    group_ids: list[int]
    record_ids: list[int]
    """One per trajectory: the key under which scores are written back."""
    waiting_for: str = ""
    """If not ready: what is missing and who owes it."""
    ledger: dict[str, int] = msgspec.field(default_factory=dict)
    """The counts of `Status.ledger` in the transaction of the draw."""
    fidelity: LengthFidelity = LengthFidelity()


class VisitsReply(Message, frozen=True):
    """Answer to VisitsRequest; the body is an Arrow IPC stream of `schema.VISITS`."""

    num_seen: int
    """Prompts with a group; the body has at most `planning.lengths.MOST_TOLD` of them."""
    is_expecting: bool
    """It has predictions of the others."""


class IncarnationReply(Message, frozen=True):
    """Answers `BeginIncarnation`."""

    incarnation: int
    resumed_at: dict[int, int]
    """For every incarnation, the version that it started from."""


STAGES = {
    "wait": "nothing: no message is there",
    "receive": "take the messages of a turn, compare their checksums",
    "validate": "read what is pushed as Arrow, lay its rows out for the disk",
    "index": "check the values, settle every row, answer every request, put blocks and groups into the transaction",
    "commit": "write and sync",
    "acknowledge": "send the answers",
}
"""Stages of a turn of the service."""


class Nonsense(msgspec.Struct, frozen=True):
    """What one sender sent that no client of the run would."""

    count: int
    """Messages that were refused, and messages and rows that were quarantined."""
    first: str


class Status(Message, frozen=True):
    """Answers `StatusRequest`."""

    ledger: dict[str, int]
    """Counts by the names of `ledger.Ledger`, with 'gap' (0 or a bug)."""
    quarantined_by_reason: dict[str, int]
    failed_by_reason: dict[str, int]
    num_ready_groups: int
    num_drawn_groups: int
    newest: tuple[int, int]
    version: int
    num_records: int
    size_bytes: int
    draining: bool
    num_damaged: int = 0
    """Blocks of records that the last scrub found damaged."""
    fidelity: LengthFidelity = LengthFidelity()
    fidelity_alarm: bool = False
    nonsense: dict[str, Nonsense] = msgspec.field(default_factory=dict)
    spent_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds of the service since it started, by `STAGES`."""


Request = (
    Hello | LeaseRequest | Push | GiveUp | HandOn | Renew | DrawRequest | WriteScores | VisitsRequest
    | Expect | StepFinished | Published | CheckpointDurable | BeginIncarnation | Drain | StatusRequest
)  # fmt: skip
Reply = (
    Welcome | LeaseGrant | PushReply | RenewReply | DrawReply | VisitsReply | IncarnationReply
    | Status | Done | Refused
)  # fmt: skip

_ACTOR: frozenset[Role] = frozenset({"actor"})
_LEARNER: frozenset[Role] = frozenset({"learner"})
_RANKER: frozenset[Role] = frozenset({"ranker"})

ASKED_BY: dict[type[Message], frozenset[Role]] = {
    Hello: ROLES,
    StatusRequest: ROLES,
    Drain: frozenset({"launch"}),
    LeaseRequest: _ACTOR,
    Push: _ACTOR,
    GiveUp: _ACTOR,
    HandOn: _ACTOR,
    Renew: _ACTOR,
    BeginIncarnation: _LEARNER,
    DrawRequest: _LEARNER,
    WriteScores: _LEARNER,
    VisitsRequest: _RANKER,
    Expect: _RANKER,
    StepFinished: _LEARNER,
    Published: _LEARNER,
    CheckpointDurable: _LEARNER,
}
"""Who may ask what."""

PROTOCOL = Protocol(
    "buffer service",
    13,
    Request,
    Reply,
    asked_by=ASKED_BY,
    # Room for some ten thousand lease ids; each id of a longer list would cost its time before anyone else is served.
    max_header_bytes=256 * 2**10,
)
encode, decode = PROTOCOL.encode, PROTOCOL.decode

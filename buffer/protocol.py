"""Messages between `BufferClient` and `BufferService`; a body, if any, is an Arrow IPC stream.

A client sends Hello first. The service refuses requests of other clients, and requests that `ALLOWED_ROLES` does not
allow to the client's role. Requests are idempotent: each has a key (an epoch and sequence number, a lease, a step).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, ClassVar

import msgspec

from leeway.buffer.lengths import LengthFidelity
from leeway.common.rpc.messages import RETRY as RETRY
from leeway.common.rpc.messages import ROLES, Count, Message, Protocol, Role
from leeway.common.rpc.messages import Done as Done
from leeway.common.rpc.messages import Refused as Refused

Number = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A time span in seconds; neither NaN nor infinite."""


# --- requests -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a client. Hello opens a new epoch for the client's name and fences its older epochs."""

    role: Role
    name: str
    session: str
    """Random id of the client process; a repeated Hello opens no epoch. All fields equal those of `ClientIdentity`."""


class LeaseRequest(Message, frozen=True):
    """Request of an actor for up to `max_groups` groups of K samples."""

    actor: str
    epoch: Count
    request_number: Count
    """Increases with every request of an epoch; a repeated number returns the same leases."""
    max_groups: Count
    lane: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Pool of the actor; actors of one lane have equal speed."""
    token_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """Seconds per token of each sample when the actor runs at capacity; 0 if unknown."""
    wants_lengths: bool = False
    """True if the leases should include length predictions."""


class Push(Message, frozen=True):
    """Completed trajectories; the body is an Arrow IPC stream of them."""

    is_bulk: ClassVar[bool] = True

    actor: str
    epoch: Count


class GiveUp(Message, frozen=True):
    """Report of failed samples of a lease: their generation or reward failed."""

    actor: str
    epoch: Count
    lease_id: Count
    attempt: Count
    sample_indices: list[Count]
    reason: str


class HandOn(Message, frozen=True):
    """Unfinished samples of a lease to requeue. The body holds their partial rollouts, as trajectories with
    finish_reason `schema.REQUEUED`. Any other sample starts from an earlier partial rollout, or from the prompt.
    """

    is_bulk: ClassVar[bool] = True

    actor: str
    epoch: Count
    lease_id: Count
    attempt: Count
    sample_indices: list[Count]
    goes_on: bool = False
    """True if the actor continues generating and saves the partial rollouts only for the case that it crashes."""


class Renew(Message, frozen=True):
    """Request to extend the deadlines of these leases."""

    actor: str
    epoch: Count
    lease_ids: list[Count]


class DrawRequest(Message, frozen=True):
    """Request of the learner for the groups of step `step`, which begins at `version`."""

    step: Count
    """Steps are counted from 1: after step n, n steps are finished."""
    version: Count
    """Number of optimizer steps taken when this step begins."""
    incarnation: Number
    num_groups: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    wait_s: Seconds
    """Timeout after which the service answers even if the step is not ready."""
    allowed_lag: Count | None = None
    """Lag bound for leasing new groups, if it is smaller than `max_lag`; if None, `max_lag` applies."""


class WriteScores(Message, frozen=True):
    """Reference log-probabilities of trajectories; the body is an Arrow IPC stream of `schema.SCORES`."""


class PosteriorsRequest(Message, frozen=True):
    """Request for the length posteriors of the prompts whose groups completed most recently."""


class Expect(Message, frozen=True):
    """Length predictions of prompts without a group; the body has a row of `schema.EXPECTED` for each prompt from
    `first` on.
    """

    is_bulk: ClassVar[bool] = True

    first: Count
    variance: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    """Variance of the prompts' offsets around their predictions."""


class StepFinished(Message, frozen=True):
    """Report that step `step` is done and the learner is at `version`, which increases by 1 per applied update."""

    step: Count
    version: Count
    incarnation: Number
    skipped: bool = False
    """True if no update was applied; then `version` is the version at which the step began."""


class Published(Message, frozen=True):
    """Report that actors can pull this version from the weight store."""

    incarnation: Number
    version: Count


class CheckpointDurable(Message, frozen=True):
    """Report that a checkpoint at `step` is durable; uses of groups up to and including this step are final."""

    step: Count
    incarnation: Number


class BeginIncarnation(Message, frozen=True):
    """Report that a learner starts, or restarts from a checkpoint, at `version`, after `step` finished steps."""

    session: str
    version: Count
    step: Count


class Drain(Message, frozen=True):
    """Command to grant no further leases until another learner begins."""


class StatusRequest(Message, frozen=True):
    """Request for `Status`."""


# --- replies --------------------------------------------------------------------------------------


class Credit(msgspec.Struct, frozen=True):
    """Limit of unacknowledged data per client; bounds the memory of client and service."""

    rows: int = 1024
    size_bytes: int = 16 * 2**20


class Welcome(Message, frozen=True):
    """Reply to Hello."""

    epoch: int
    """Number of the client process among the processes of the same name, counted from 1."""
    credit: Credit = Credit()


class Lease(msgspec.Struct, frozen=True):
    """Permission to generate samples of one group."""

    lease_id: int
    attempt: int
    group_id: int
    prompt_id: int
    sample_indices: list[int]
    """Indices of the group's missing samples; at the first attempt, all K samples are missing."""
    min_version: int
    """Minimum policy version at which requests of this lease start."""
    timeout_s: float
    prefixes: list[int] = []
    """Indices of samples with partial rollouts."""
    usual_tokens: float = 0.0
    """Predicted geometric mean of the tokens of its prompt's completions; 0 if unknown or not requested."""


class LeaseGrant(Message, frozen=True):
    """Reply to LeaseRequest; `leases` is empty if no group can be leased. The body has a row for each of the
    `prefixes` of each lease, in order.
    """

    leases: list[Lease]
    newest: tuple[int, int]
    draining: bool
    requeue_at: Count = 0
    """Number of tokens at which the actor requeues a late sample for a faster lane; 0 disables requeuing."""
    is_near_bound: bool = False
    """Admission was closed recently, so the actor should lease no more groups than it needs."""


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one pushed trajectory."""

    seq: int
    outcome: str
    """One of 'committed', 'duplicate', 'late', 'fenced' and 'quarantined', as `leeway.buffer.ingest` defines them."""
    reason: str = ""


class PushReply(Message, frozen=True):
    """Reply to Push, sent after the transaction is on disk."""

    committed: list[tuple[int, int]]
    """First and last sequence number of each range of committed trajectories."""
    others: list[RowResult]
    credit: Credit | None = None

    @property
    def results(self) -> list[RowResult]:
        """Outcomes of all trajectories, in order of sequence numbers."""
        runs = [RowResult(seq, "committed") for first, last in self.committed for seq in range(first, last + 1)]
        return sorted([*runs, *self.others], key=attrgetter("seq"))


class RenewReply(Message, frozen=True):
    """Reply to Renew, with the leases that the actor no longer holds."""

    lost: list[int]


class DrawReply(Message, frozen=True):
    """Reply to DrawRequest. If `ready`, the body holds the trajectories in the order of `group_ids`."""

    ready: bool
    step: int
    group_ids: list[int]
    record_ids: list[int]
    """The key of each trajectory, under which scores are written back."""
    waiting_for: str = ""
    """If the step is not ready: the missing samples and the actors that hold their leases."""
    ledger: dict[str, int] = msgspec.field(default_factory=dict)
    """The counts of `Status.ledger`, read in the transaction of the draw."""
    fidelity: LengthFidelity = LengthFidelity()


class PosteriorsReply(Message, frozen=True):
    """Reply to PosteriorsRequest; the body is an Arrow IPC stream of `schema.POSTERIORS`."""

    num_seen: int
    """Number of prompts with a group; the body has at most `leeway.planning.lengths.MAX_POSTERIORS` rows."""
    is_expecting: bool
    """True if the service has the ranker's length predictions."""


class IncarnationReply(Message, frozen=True):
    """Reply to BeginIncarnation."""

    incarnation: int
    resumed_at: dict[int, int]
    """Incarnation -> the version that it started from."""


STAGES = {
    "wait": "idle, without messages",
    "receive": "receive the messages of a turn, compare their checksums",
    "validate": "decode pushed Arrow bodies, encode their rows for the disk",
    "index": "validate values, handle every row and request, put blocks and groups into the transaction",
    "commit": "write and sync",
    "acknowledge": "send the replies",
}
"""Stages of a turn of the service."""


class InvalidMessages(msgspec.Struct, frozen=True):
    """Count and first example of one sender's invalid messages, which no correct client sends."""

    count: int
    """Number of refused messages, and of quarantined messages and rows."""
    first: str


class Status(Message, frozen=True):
    """Reply to StatusRequest."""

    ledger: dict[str, int]
    """Counts by the field names of `ledger.Ledger`, and 'gap', which is above 0 only because of a bug."""
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
    """Damaged blocks of records found by the last scrub."""
    fidelity: LengthFidelity = LengthFidelity()
    fidelity_alarm: bool = False
    invalid_messages: dict[str, InvalidMessages] = msgspec.field(default_factory=dict)
    spent_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds spent in each of `STAGES` since the start of the service."""


Request = (
    Hello | LeaseRequest | Push | GiveUp | HandOn | Renew | DrawRequest | WriteScores | PosteriorsRequest
    | Expect | StepFinished | Published | CheckpointDurable | BeginIncarnation | Drain | StatusRequest
)  # fmt: skip
Reply = (
    Welcome | LeaseGrant | PushReply | RenewReply | DrawReply | PosteriorsReply | IncarnationReply
    | Status | Done | Refused
)  # fmt: skip

_REQUESTS_OF: dict[Role, tuple[type[Message], ...]] = {
    "launch": (Drain,),
    "actor": (LeaseRequest, Push, GiveUp, HandOn, Renew),
    "learner": (BeginIncarnation, DrawRequest, WriteScores, StepFinished, Published, CheckpointDurable),
    "ranker": (PosteriorsRequest, Expect),
}
ALLOWED_ROLES: dict[type[Message], frozenset[Role]] = {
    **dict.fromkeys((Hello, StatusRequest), ROLES),
    **{request: frozenset({role}) for role, requests in _REQUESTS_OF.items() for request in requests},
}
"""Roles that may send each request."""

PROTOCOL = Protocol(
    "buffer service",
    13,
    Request,
    Reply,
    allowed_roles=ALLOWED_ROLES,
    # Enough for about ten thousand lease ids; decoding a longer list would delay all other clients.
    max_header_bytes=256 * 2**10,
)
encode, decode = PROTOCOL.encode, PROTOCOL.decode

"""The durable replay buffer: every trajectory is on disk before it is acknowledged.

trajectory  Trajectory and VersionSpan: one sample
schema      the one Arrow schema of wire and disk; validation of what comes from outside
protocol    the control messages between client and service (msgspec), one struct per request
store       Store: the LMDB environment, its tables (`tables`) and checksummed values
ledger      Ledger: where every issued sample is, and the identities that must hold
groups      Groups: the life of a group of samples, and its entries in the ledger
leases      Leases: which prompts are out with which actor, and when they are issued again
intake      Intake: what becomes of pushed trajectories, row by row
draws       Draws: which groups train at which step (`laws` choose), recorded and idempotent
core        BufferCore: every request against one transaction, without sockets
service     BufferService: the one process that owns the store, behind a ZeroMQ ROUTER
client      BufferClient: what actors and the learner talk through (`transport` sends and resends,
            `futures` completes)
verify      checks a whole store; `python -m buffer --folder FOLDER --verify`
"""

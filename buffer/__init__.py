"""The durable replay buffer: every trajectory is on disk before it is acknowledged.

trajectory  Trajectory and VersionSpan, and the one Arrow schema of wire, disk and exported table
protocol    the control messages between client and service (msgspec), one struct per request
store       Store: the LMDB environment, its tables and checksummed records
ledger      Ledger: where every issued sample is, and the identities that must hold
leases      which prompts are out with which actor, and when they are issued again
draws       which groups train at which step, recorded and idempotent
service     BufferService: the one process that owns the store, behind a ZeroMQ ROUTER
client      BufferClient: what actors and the learner talk through
"""

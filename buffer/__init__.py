"""The durable replay buffer: every trajectory is on disk before it is acknowledged.

Read it from the outside in. Imports point from each part to those below it.

The processes
    client      BufferClient: what actors and the learner talk through (`outbox` collects trajectories)
    service     BufferService: the one process that owns a store (`upkeep` syncs, watches readers and scrubs)
    offline     tools that read, verify or export a store, live or over, or fill one
What is said
    protocol    the control messages (msgspec), one struct per request
    schema      Trajectory, and the one Arrow schema of wire and export; reads what comes from outside
The rules, each in the given transaction
    core        BufferCore: every request, without sockets
    leases      which prompts are out with which actor, and when they are issued again
    ingest      what becomes of pushed trajectories, row by row, and what a row must satisfy
    steps       Steps: which groups train at which step, recorded and idempotent, and what becomes of them
    samplers    which of the groups that are ready a step takes
    groups      the life of a group of samples, which groups leave a full store, and which prompt is leased next:
                the data's order, or what `planning.prompts` chooses
    lengths     Fidelity: which lengths were generated, and which of them are trained
    ledger      where every issued sample is, and the identities that must hold
The store
    store       Store: the LMDB environment of a folder (`pages` checks its file)
    transaction tables within a transaction, sealed by checksums; `tables`: what their rows are
    rows        a trajectory on disk
    index       GroupIndex: in memory, the groups by what the rules look for
config and errors are what all of them speak of.
"""

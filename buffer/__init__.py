"""The durable replay buffer: every trajectory is on disk before it is acknowledged.

Modules from the outermost to the innermost; each imports only from modules below it.

Processes
    client      BufferClient, used by actors, learner and launcher (`outbox` batches trajectories into messages)
    service     BufferService: the one process that owns a store (`upkeep` syncs, watches readers and scrubs)
    offline     tools that read, verify or export a store, during or after its run, or load samples into a new one
Messages
    protocol    control messages (msgspec), one struct per request
    schema      Trajectory and its Arrow schema for messages and exports; encodes and validates message bodies
Rules, each applied in the transaction of its caller
    core        BufferCore: handles every request, without sockets
    leases      Leases: which actor holds which prompt, and when the lease expires
    ingest      Ingest: validates pushed trajectories and decides the outcome of each row
    steps       Steps: chooses and records the groups that each step trains on, and changes their state afterwards
    samplers    policies that choose the groups of a step among the ready groups
    groups      the life cycle of a group of samples, eviction from a full store, and the choice of the next prompt:
                in the data's order, or by `leeway.planning.prompts`
    lengths     Fidelity: compares the lengths of completions used for training with those of all completions
    ledger      Ledger: counts of the samples in each state, and the identities that must hold
Store
    store       Store: the LMDB environment of a folder (`pages` checks its file)
    transaction tables within a transaction, with a checksum on every value; `tables` defines their rows
    rows        the block format of trajectories on disk
    index       GroupIndex: in-memory indexes of the groups
All modules share `config` and `errors`.
"""

"""A run in one process: actors, buffer, weights and learner under virtual time, with seeded randomness.

knobs       Knobs and Faults: the settings and fault rates that a seed determines
world       World: the processes, the messages between them, and the scheduler
seeds       `simulate`: the run of one seed, and totals over many seeds
actor       SimActor: leases, starts and finishes samples, pulls weights
learner     SimLearner: draws, trains, publishes, writes checkpoints
shelf       Shelf: the published versions, in increasing order
witness     Witness: a record of sampling and training, and the invariants; shares no code with the policy
book        Book: the buffer as a dictionary of groups (depth "policy": 100,000 seeds in a minute)
core        CoreBuffer: the real `BufferCore` in an LMDB transaction (depth "system")
mutations   each check of the policy, disabled in turn

`python -m tests.simulation --seed 17 --trace` prints every event of one seed. Equal seeds give equal runs.
"""

"""A run in one process: actors, buffer, weights and learner under virtual time and seeded chance.

knobs       Knobs and Faults: what run a seed makes, and what goes wrong in it
world       World: the processes, the wire between them, and who moves next
seeds       one run of a seed (`simulate`), and many of them
actor       SimActor: leases, starts and finishes samples, pulls weights
learner     SimLearner: draws, trains, publishes, writes checkpoints, dies
shelf       Shelf: the published versions, committed in growing order
witness     Witness: what really sampled and trained what, and the invariants; shares no code with the policy
book        Book: the buffer as a plain dictionary of groups (depth "policy": 100,000 seeds in a minute)
core        CoreBuffer: the real `BufferCore` within an LMDB transaction (depth "system")
mutations   each check of the policy, switched off

`python -m tests.simulation --seed 17 --trace` shows one seed, event by event. The same seed is the same run.
"""

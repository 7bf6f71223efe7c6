"""Parts of benchmarks/weights.py.

peers        a process that does what it is told over a pipe, and ends with the one that tells it
roles        what a peer can be: engine, learner, sender, receiver, service, samples; one file each, `*_role`
measurements update, deltas, sync, hosts, fairness, copying: who is told what, and when; one file each
figures      from raw numbers to figures
report       bars, and the page docs/results/weights.md
"""

"""Actors: they lease prompts, generate with vLLM, score, and push each trajectory as it completes.

engine    Engine: the one file that knows vLLM's API
tasks     Task: prompts and a reward; from reasoning-gym by name, or from files
rewards   scoring with TRL's function shape; a failure is counted, never scored 0
loop      ActorLoop: lease, generate, score, push; pulls newer weights in flight
evaluate  held-out accuracy at one version, outside the ledger
"""

"""Actors lease prompts, generate with vLLM, score the completions, and push each trajectory as it completes.

engine    Engine: generates with vLLM and loads newer weights between engine steps
engine_core  EngineCore: vLLM's core on a thread, or in other processes; Generation: the output of a request
engine_setup  vLLM's arguments and environment; EngineSockets: the folder of vLLM's own sockets
config    the `[actors]` section; Admission: decides when samples start, by slots or `leeway.planning.kv_gate`
tasks     Task: prompts and a reward, from reasoning-gym by name or from files
rewards   Scorer: calls reward functions with TRL's signature; a failed call is counted and never gives reward 0
reward_process  RewardProcess: runs a reward function in its own process, which contains hangs and crashes
sandbox   runs programs that a model wrote; blocks the network access of a process
weights   WeightFollower: pulls newer weights during generation and decides when a request may start; ActorError
sample    SampleMaker: generates and scores training samples and the answers of an evaluation
          HeldLease: a lease and its samples; PartialRollouts: requeues unfinished samples
loop      ActorLoop: leases prompts, pushes trajectories and renews leases; ActorComponents: the parts of an actor
report    ActorReport: state and metrics that an actor sends to the launcher; EngineStats: costs of engine steps
"""

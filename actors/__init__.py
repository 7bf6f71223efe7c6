"""Actors: they lease prompts, generate with vLLM, score, and push each trajectory as it completes.

engine    Engine: generates with vLLM, and takes newer weights while it does
engine_setup  its arguments and environment; EngineSockets: where vLLM's own sockets lie, and their end
engine_output  Generation: what one request generated, whole or in part
           EngineStats: what its steps cost, how full its cache is, whom it preempts
config    the `[actors]` section; Admission: which samples the engine starts, by `planning.kv_gate` or a semaphore
tasks     Task: prompts and a reward; from reasoning-gym by name, or from files
rewards   Scorer: TRL's function shape; a failure is counted, never scored 0
reward_process  RewardProcess: where a reward function runs, and may hang or crash
sandbox   where programs that a model wrote are run; how a process is cut off from the network
weights   WeightFollower: pulls newer weights in flight, and says when a request may start; ActorError
sample    SampleMaker: generates a sample, and makes a scored trajectory of it; held-out accuracy at one version
          HeldLease: a lease and its samples; HandingOn: how they go on elsewhere
loop      ActorLoop: lease, make samples, push, renew; what it works with, and how that is started
report    ActorReport: what an actor tells the launcher
"""

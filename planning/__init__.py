"""Optional: what a run will do before it runs, and what follows from that. Lies above `launch`; no package imports it.

A key or a verb loads what it asks for by its dotted name (`pkgutil.resolve_name`).

verbs      `leeway profile` and `leeway plan`
profiling  what a run cost, from folders of runs; two short ones that are made for it
planner    Planner: the best plan of a config on its hosts (`plans`: hosts, what a run would do, by
           simulated runs, the patch)
prompts    ChosenPrompts: prompts by chance, by their success, and by how long their answers will be (`length_model`);
           `dispatch`: policies of who gets which
ranking    Ranker: predicts lengths of answers to new prompts (`ranker_service`: its process)
kv_gate    KvGate: which samples an engine starts, as its cache has room for them to their end
fused      FusedPasses: policy and critic model at once (`learner.schedule = "fused"`), in an order of `orders`
autoscale  pools of actors that follow the lengths and costs of a run

The simulator, which needs neither torch nor vLLM nor Ray:

lengths    LengthLaw: how long completions are, and how much of that the prompt decides
world      World: a run as a simulation has it, and what it costs; TokenClock: the samples that share an engine, in
           time; Outcome: what became of it
buffer     SimulatedBuffer: the groups of a simulated run, under the rules of the real one
simulator  Simulation: a whole run, event by event, decided by the policies of the run itself
learner    LearnerTime: how long a step takes, for any shape of the learner
costs      TokenTime, Moments: linear laws of cost, and their fit to what was measured
profile    Profile: what the parts of a run cost on one machine with one model
bounds     what each part of a run allows by itself, in closed form
search     the best of many plans: enumerated, or walked by Metropolis chains
"""

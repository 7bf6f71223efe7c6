"""Optional: what a run will do before it runs, and what follows from that. Lies above `launch`; no package imports it.

A key or a verb loads what it asks for by its dotted name (`pkgutil.resolve_name`).

verbs      `leeway profile` and `leeway plan`
profiling  what a run cost, from folders of runs; two short ones that are made for it
planner    Planner: the best plan of a config on its hosts (`plans`: hosts, what a run would do, by
           simulated runs, the patch)
prompts    ChosenPrompts: prompts by chance, by their success, and by how long their answers will be;
           `dispatch`: policies of who gets which
lengths    LengthModel: how long the answers to each prompt will be; LengthLaw: how long those of a simulation are
ranking    Ranker: predicts lengths of answers to new prompts, in a process of its own
kv_gate    KvGate: which samples an engine starts, as its cache has room for them to their end
fused      FusedPasses: policy and critic model at once (`learner.schedule = "fused"`)
autoscale  pools of actors that follow the lengths and costs of a run

The simulator, which needs neither torch nor vLLM nor Ray:

world      World: a run as a simulation has it, and what it costs; TokenClock: the samples that share an engine, in
           time; Outcome: what became of it
buffer     SimulatedBuffer: the groups of a simulated run, under the rules of the real one
simulator  Simulation: a whole run, event by event, decided by the policies of the run itself
costs      TokenTime, LearnerTime: linear laws of a step of an engine and of the learner; Moments: their fit
profile    Profile: what the parts of a run cost on one machine with one model
search     what each part of a run allows by itself, in closed form; the best of many plans by that
"""

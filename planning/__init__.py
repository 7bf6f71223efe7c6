"""Optional: cost models, simulation and planning of runs. Top layer, above `launch`; no package imports it.

Features are imported on first use, by the dotted name (`pkgutil.resolve_name`) that a config key or command maps to.

verbs      `leeway profile` and `leeway plan`
profiling  profiles from run folders, or from three short runs started for this purpose
planner    Planner: finds the best plan for a config (`plans`: hosts, predictions from simulations, TOML patch)
prompts    ChosenPrompts: prompt sampling at random or by success rate, dispatch by predicted length;
           `dispatch`: policies that assign prompts to actors
lengths    LengthModel: predicted completion lengths per prompt; LengthDistribution: lengths in simulations
ranking    Ranker: predicts completion lengths of unseen prompts, in a separate process
kv_gate    KvGate: KV-cache admission control of an engine
fused      FusedPasses: fused passes of policy and critic model (`learner.schedule = "fused"`)
autoscale  Autoscale: sizes actor pools from measured lengths and costs

The simulator, which needs neither torch nor vLLM nor Ray:

world      World: inputs and costs of a simulated run; TokenClock: simulated engine; Outcome: metrics of a simulated run
buffer     SimulatedBuffer: groups of a simulated run, under the rules of the real buffer
simulator  Simulation: discrete-event simulation of a run, with the policies of the run itself
costs      TokenTime, LearnerTime: linear cost models of engine and learner steps; LeastSquares: fits them
profile    Profile: measured costs of a run on one machine with one model
search     closed-form bounds on the throughput of a run; search for the best plans by these bounds
"""

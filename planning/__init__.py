"""What a run will do before it runs, from what its parts cost. Nothing here needs torch, vLLM or Ray.

lengths    LengthLaw: how long completions are, and how much of that the prompt decides
world      World: a run as a simulation has it, and what it costs; TokenClock: the samples that share an engine, in
           time; Outcome: what became of it
buffer     SimulatedBuffer: the groups of a simulated run, under the rules of the real one
simulator  Simulation: a whole run, event by event, decided by the policies of the run itself
learner    LearnerTime: how long a step takes, for any shape of the learner
profile    Profile: what the parts of a run cost on one machine with one model
bounds     what each part of a run allows by itself, in closed form
prediction  Prediction: what simulated runs come to, with an interval
search     the best of many plans: enumerated, or walked by Metropolis chains
"""

"""What a run will do before it runs, from what its parts cost. Nothing here needs torch, vLLM or Ray.

lengths    LengthLaw: how long completions are, and how much of that the prompt decides
engine     TokenClock: the samples that share an engine, in time
world      World: a run as a simulation has it, and what it costs; Outcome: what became of it
simulator  Simulation: a whole run, event by event, decided by the policies of the run itself
"""

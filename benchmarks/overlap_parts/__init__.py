"""The parts of benchmarks/overlap.py.

long_tail  a checkpoint whose completions end at random, with a long tail of lengths
setting    the config, prompts and reward of the runs
cores      the actor on one core, everything else on another
figures    what is computed from the runs
report     the page
"""

"""The parts of benchmarks/tuning.py.

sweeps   which knobs are turned, and to what
figures  what is computed from a run
charts   a small figure for each knob
report   the page
"""

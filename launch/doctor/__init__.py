"""`leeway doctor`: is this machine fit for a run? Every look is bounded in time, and none is ever a traceback.

finding     Finding, and examine: the checks side by side, each with its limit
libraries   Python, the pinned versions, pairs that do not work, vLLM's import, GPUs
machine     disk, memory, /dev/shm, open files, the clock
services    ports, Ray, Weights & Biases
leftovers   what dead runs left behind, with the command that removes it
checkup     which checks there are
"""

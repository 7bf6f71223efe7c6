"""Helpers shared by tests: the environment around the component under test.

buffer       the buffer in this process, and a simulated actor
service      the buffer service as a process, with a protection disabled or constants changed
learner      small models, generated trajectories, and the ranks of a learner as processes
live_run     a real `leeway train`, whose processes a test can stop, continue and kill
run_context  the run context that processes of a run receive
waiting      waits with a timeout, and bounds of measured times
files, ports, terminal
"""

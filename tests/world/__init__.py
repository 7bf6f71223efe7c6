"""What the tests share: the world around the part that one of them looks at.

buffer       the buffer in this process, and an actor that works with it
service      the buffer's service in a process, without one of its protections or with other constants
learner      small models, made-up trajectories, and the ranks of a learner as processes
live_run     a real `leeway train`, whose roles a test stops, continues and kills
run_context  what the processes of a run are handed
waiting      waits, and what a measured time may be
files, ports, terminal
"""

"""Tools that read a store during or after its run, or load samples into a new one.

inspect     Inspection: groups and their samples; export and verify
recorded    samples of a store or a file, and loading them into the buffer of another run
"""

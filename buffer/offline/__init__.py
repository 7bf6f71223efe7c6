"""Tools that read a store beside its service, or fill a new one.

inspect     Inspection: groups and their samples; export and verify
recorded    the samples of a store or a file, which fill the buffer of another run
"""

"""Tools that read a store beside its service, or fill a new one.

inspect     Inspection: groups and their samples; verify
sample_file samples in a file: a store as Parquet, and samples out of a file
recorded    the samples of a store or a file, which fill the buffer of another run
"""

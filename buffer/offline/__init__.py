"""Tools that look at a store beside its service, or rewrite one that is over.

inspect     Inspection: groups, their samples and the quarantine; verify and compact
sample_file samples in a file: a store as Parquet, and samples out of a JSON Lines or Parquet file
recorded    the samples of a store or a file, which fill the buffer of another run
"""

"""Tools that look at a store beside its service, or rewrite one that is over.

inspect     Inspection: groups, their samples and the quarantine, read in short transactions
sample_file samples in a file: a store as Parquet, and samples out of a JSON Lines or Parquet file
recorded    the samples of a store or a file, which fill the buffer of another run
verify      proves a whole store: checksums, tables, ledger; or compacts it: without its free pages
"""

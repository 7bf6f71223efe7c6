"""Tools that look at a store beside its service, or rewrite one that is over.

inspect     Inspection: groups, their samples and the quarantine, read in short transactions
export      a store as a Parquet file
compact     a store without its free pages
verify      proves a whole store: checksums, tables, ledger
"""

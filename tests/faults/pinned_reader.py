"""A process that keeps a read transaction open: `python pinned_reader.py FOLDER`. Prints a line once it is open."""

import sys
import time

import lmdb

environment = lmdb.open(sys.argv[1], readonly=True, max_dbs=64)
with environment.begin() as txn:
    txn.stat()
    print("reading", flush=True)
    time.sleep(600)

"""A process that reads a store and does not stop: `python pinned_reader.py FOLDER`. Prints a line once it reads."""

import sys
import time

import lmdb

environment = lmdb.open(sys.argv[1], readonly=True, max_dbs=64)
with environment.begin() as txn:
    txn.stat()
    print("reading", flush=True)
    time.sleep(600)

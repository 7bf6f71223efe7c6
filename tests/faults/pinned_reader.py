"""A process that keeps a read transaction open: `python pinned_reader.py FOLDER`.

It prints a line once the transaction is open.
"""

import sys
import time

import lmdb

environment = lmdb.open(sys.argv[1], readonly=True, max_dbs=64)
with environment.begin() as txn:
    txn.stat()
    print("reading", flush=True)
    time.sleep(600)

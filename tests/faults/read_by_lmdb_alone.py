"""Read every value of a store with LMDB only, without checks: `python read_by_lmdb_alone.py FOLDER`.

This is the positive control of row 10 of the fault matrix: it shows how a damaged file affects a program that trusts
the file.
"""

import sys

import lmdb

environment = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=64)
with environment.begin() as txn:
    names = [bytes(name) for name, _ in txn.cursor()]
    tables = [environment.open_db(name, txn=txn, create=False) for name in names]
    print(sum(len(value) for table in tables for _, value in txn.cursor(db=table)))

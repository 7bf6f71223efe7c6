"""Checksummed requests and replies over ZeroMQ between the services of a run and their clients.

messages   types shared by all services: Envelope, Refused, Done, and the checksum that seals a header
client     RpcClient: one thread that sends, resends and matches replies; every request is idempotent
server     RpcServer: the socket of a service, and its address, which a restarted service keeps
auth       the keys of a run, and CurveAuthenticator, which admits only clients with a key
"""

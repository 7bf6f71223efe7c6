"""Sealed requests and replies over ZeroMQ between the services of a run and their clients.

messages   what the requests of every service share: Envelope, Refused, Done, and the seal
client     RpcClient: one thread that sends, resends and pairs; every request is idempotent
server     RpcServer: the socket of a service, and an address that a restarted service keeps
auth       the keys of a run, and the Doorkeeper that lets only their holders in
"""

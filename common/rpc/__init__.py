"""How a service of a run is asked: sealed requests and replies over ZeroMQ, behind a lock, whatever is lost on the way.

messages   what the requests of every service share: Envelope, Refused, Done, and the seal that damage does not pass
client     RpcClient: one thread that sends, resends and pairs; every request is safe to send again
server     RpcServer: the socket of a service, what comes over it, and an address that a restarted service keeps
auth       the keys of a run, and the Doorkeeper that lets only their holders in
"""

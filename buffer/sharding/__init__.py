"""One buffer of several services, each with the prompts of its hash.

client      open_client, ShardedClient: the services of all shards behind one client
shards      Shard: what that client knows of one of them, and what it has not answered yet
division    which shard owns what, and how many groups of a step each one gives
"""

"""One buffer of several services, each with the prompts of its hash.

client      open_client, ShardedClient: the services of all shards behind one client
shards      Shard: what that client knows of one of them, and what it has not answered yet
core        ShardCore: the rules of `buffer.core` as a service runs them, and what a part of a run needs beside them
division    which shard owns what and where it lies, and how many groups of a step each one gives
"""

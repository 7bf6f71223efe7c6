"""What a user may keep trajectories in, each behind one function: `measure(work, folder) -> figures`.

workload     the trajectories: the same for everybody
leeway       the buffer of this repository
limits       raw ZeroMQ with Arrow and no store; LMDB alone
mp_queue     pickle over multiprocessing.Queue
ray_peers    a Ray actor that holds a list; ray.util.queue
torchrl_peer TorchRL's ReplayBuffer on memory-mapped storage
redis_peer   a Redis stream whose append-only file is synced always
transferqueue_peer  TransferQueue, the data plane of verl

Every round runs in processes of its own (`python -m buffer_peers NAME`), so none warms up another.
"""

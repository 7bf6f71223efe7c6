"""The processes of a run: where they are placed, started, watched, started again, ended.

supervisor  Supervisor: starts all of them, restarts what may be restarted, ends all of them
fleet       Fleet: the actors of all pools, which come and go
stages      Stages: the processes of the learner, started again as a whole
services    Services: processes that serve at an address, started again there where they end
buffers     Buffers: the buffer services, one per shard, and the launcher's own client of them
weights     Weights: the weight service
evaluation  Evaluation: held-out problems spread over the actors
roles       the Ray actors that host buffer, stages and actors, one process and one log each
role_process    RoleProcess: one process as the supervisor sees it
placement   Place, Gang: on which hosts, with a bound on every wait
spawn       Ray, and one process on it
ray_watch   RayWatch: sees that Ray's own processes died
guardian    ends what a killed command leaves behind; a program of its own
"""

"""The processes of a run: placement, start, monitoring, restarts and shutdown.

supervisor     Supervisor: starts all processes of a run, restarts failed ones, and shuts all of them down
learner_group  LearnerGroup: the ranks of the learner, restarted as a group
actor_pools    ActorPools: starts and stops the actors of all pools one by one; Evaluation: shards held-out problems
               over the actors
actor_role     ActorRole: one actor in its own process, which shuts down gracefully on SIGTERM
services       BufferHost, WeightsHost: host the buffer and the weight service, and restart each at its old address
role_process   Role: base class of the processes; RoleProcess: the supervisor's record of one; Restarts: restart budget
placement      PlacementGroup, Reservation: resources on hosts, with a timeout on every wait; PlacedProcess: a process
               with its own placement; spawn: starts a process that hosts a role
ray_cluster    start_ray, end_ray: start and stop Ray; RayWatch: detects that Ray's own processes died, and kills the
               processes of a killed launcher
"""

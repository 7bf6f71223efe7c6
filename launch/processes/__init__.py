"""The processes of a run: placement, start, monitoring, restarts and shutdown.

supervisor     Supervisor: starts every process, restarts those that may be restarted, shuts all of them down
learner_group  LearnerGroup: the ranks of the learner, restarted as a group
actor_pools    ActorPools: the actors of all pools, started and stopped one by one; Evaluation: held-out problems
               sharded over them
actor_role     ActorRole: one actor in its own process, which shuts down gracefully on SIGTERM
services       BufferHost, WeightsHost: processes that serve at an address and are restarted there
role_process   Role: what a process hosts; RoleProcess: the supervisor's record of one; Restarts: a restart budget
placement      PlacementGroup, Reservation: resources on hosts, with a timeout on every wait; PlacedProcess: a process
               with a placement of its own; spawn: starts a role
ray_cluster    start_ray, end_ray; RayWatch: detects the death of Ray's own processes, and kills what a killed launcher
               leaves behind
"""

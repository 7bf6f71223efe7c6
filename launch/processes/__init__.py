"""The processes of a run: placement, start, monitoring, restarts and shutdown.

supervisor     Supervisor: starts all processes of a run, restarts failed ones, and shuts all of them down
learner_group  LearnerGroup: the ranks of the learner, restarted as a group
actor_pools    ActorPools: the actors of all pools, started and stopped one by one; Evaluation: held-out problems
               sharded over the actors
actor_role     ActorRole: one actor in its own process, which shuts down gracefully on SIGTERM
services       BufferHost, WeightsHost: hosts of the services, restarted at the same address
role_process   Role: base class of hosted code; RoleProcess: the supervisor's record of a process; Restarts: a budget
placement      PlacementGroup, Reservation: resources on hosts, with a timeout on every wait; PlacedProcess: a process
               with its own placement; spawn: starts a process that hosts a role
ray_cluster    start_ray, end_ray; RayWatch: detects that Ray's own processes died, and kills the processes that a
               killed launcher leaves behind
"""

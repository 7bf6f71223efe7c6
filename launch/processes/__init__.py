"""The processes of a run: where they are placed, started, watched, started again, ended.

supervisor     Supervisor: starts all of them, restarts what may be restarted, ends all of them
learner_group  LearnerGroup: the processes of the learner, started again as a whole
actor_pools    ActorPools: the actors of all pools, which come and go singly; Evaluation: held-out problems spread over
               them
actor_role     ActorRole: one in its process, which leaves in order at SIGTERM
services       BufferHost, WeightsHost: what serves at an address, started again there where it ends
role_process   Role: what a process hosts; RoleProcess: one as the supervisor sees it; Restarts: how often it is started
               again
placement      PlacementGroup, Reservation: on which hosts, with a bound on every wait; PlacedProcess: one with a place;
               spawn: starts it there
ray_cluster    Ray started or joined, and ended; RayWatch: sees that Ray's own processes died, and ends what a killed
               command leaves behind
"""

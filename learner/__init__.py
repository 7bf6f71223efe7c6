"""The learner: pipelines of stages that train on packed batches and publish weights.

mesh         Place, Mesh: where a rank stands among stages and replicas, and its process groups
meeting      where all ranks meet, and over which interface they talk
stage        Stage: one process of the learner; the lead among them talks to the buffer
lead         Lead: the lead's conversation with the buffer service, every wait bounded
channel      Channel: how the lead hands each batch to the other ranks
assembly     networks and reference of a rank, put together from its orders

batch        StepBatch: a draw, or a part of it, as the flat arrays that a step computes with
minibatches  which sequences each update of a step trains
packing      best-fit packing of whole sequences into micro-batches of one shape
cost         CostModel: what a sequence costs to compute
step         TrainStep: a step trains one draw in one or several updates, in two passes or in one
reference    Reference: log-probabilities of the frozen model, once for every sample
judge        Judge: the loss of an update, its gradient, and whether and how it is taken
mismatch     which actor's log-probabilities are not the learner's at lag 0
updates      Update: what one of them did, and the figures of a step
bad_batches  BadBatches: what could not be trained, and when a run has diverged
report       the metrics of a step, by name
ledger_metrics  which of them is which count of the buffer's ledger

networks     Networks: the policy, and a critic that is a head of it or a model of its own
split        which layers a stage owns, by computed cost
families     what the decoders of each supported family do besides embedding, layers, norm and head
offload      Offload: where a frozen stage's weights are while it does not score
model        StageModule: a contiguous share of a Hugging Face decoder's layers
attention    block-diagonal attention over packed sequences
logprobs     log-probabilities of tokens without the full logits
pipeline     Pipeline: forward-only and training schedules over torch.distributed.pipelining
optimizer    StageOptimizer: AdamW on master weights; one verdict over all ranks
checkpoint   Checkpoints: what a restart needs, written in the background and atomically
snapshot     Snapshot: host copies of what a checkpoint holds of one rank
checkpoint_export  a checkpoint as a Hugging Face folder, without the ranks that wrote it
checkpoint_meta  CheckpointMeta, Progress: what a checkpoint says of itself, with checksums
agreement    Agreement: what fails on one rank has failed on all
hf_files     Hugging Face folders: read single tensors, export one shard per stage
"""

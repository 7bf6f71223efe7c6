"""The learner: a pipeline of stages that trains on packed batches and publishes weights.

spec         LearnerSpec: all that one stage is told
stage        Stage: one process of the pipeline; its last rank leads and talks to the buffer
lead         Lead: the lead's conversation with the buffer service, every wait bounded
channel      Channel: how the lead hands each batch to the other stages

batch        StepBatch: a draw, or a part of it, as the flat arrays that a step computes with
minibatches  which sequences each update of a step trains
packing      best-fit packing of whole sequences into micro-batches of one shape
step         TrainStep: a step trains one draw in one or several updates of two passes
reference    Reference: log-probabilities of the frozen model, once for every sample
judge        Judge: the loss of an update, its gradient, and whether and how it is taken
updates      Update: what one of them did, and the figures of a step
bad_batches  BadBatches: what could not be trained, and when a run has diverged
report       the metrics of a step, by name

networks     Networks: the policy, and a critic that is a head of it or a model of its own
split        which layers a stage owns
model        StageModule: a contiguous share of a Hugging Face decoder's layers
attention    block-diagonal attention over packed sequences
pipeline     Pipeline: forward-only and training schedules over torch.distributed.pipelining
optimizer    StageOptimizer: AdamW on float32 master weights; one verdict over all stages
checkpoint   Checkpoints: what a restart needs, written atomically
hf_files     Hugging Face folders: read single tensors, export one shard per stage
"""

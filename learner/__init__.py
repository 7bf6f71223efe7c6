"""The learner: a pipeline of stages that trains on packed batches and publishes weights.

spec         LearnerSpec: all that one stage is told
stage        Stage: one process of the pipeline; its last rank leads and talks to the buffer
lead         Lead: the lead's conversation with the buffer service, every wait bounded
channel      Channel: how the lead hands each batch to the other stages
batch        StepBatch: a draw as the flat arrays that a step computes with
packing      best-fit packing of whole sequences into micro-batches of one shape
split        which layers a stage owns
model        StageModule: a contiguous share of a Hugging Face decoder's layers
attention    block-diagonal attention over packed sequences
pipeline     Pipeline: forward-only and training schedules over torch.distributed.pipelining
step         TrainStep: the two passes of an optimizer step
optimizer    StageOptimizer: AdamW on float32 master weights, clipping over all stages, learning-rate schedule
checkpoint   Checkpoints: what a restart needs, written atomically
hf_files     Hugging Face folders: read single tensors, export one shard per stage
report       the metrics of a step, by name
"""

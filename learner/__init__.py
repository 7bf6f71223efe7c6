"""The learner: a pipeline of stages that trains on packed batches and publishes weights.

packing      best-fit packing of whole sequences into micro-batches of one fixed shape
model        StageModule: a contiguous share of a Hugging Face decoder's layers
attention    block-diagonal attention over packed sequences
pipeline     Pipeline: forward-only and training schedules over torch.distributed.pipelining
step         TrainStep: the two passes of an optimizer step
optimizer    AdamW on float32 master weights, clipping over all stages, learning-rate schedule
checkpoint   what a restart needs, written atomically; export to a Hugging Face folder
stage        Stage: one process of the pipeline; its last rank leads and talks to the buffer
"""

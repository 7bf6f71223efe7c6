"""The learner: pipelines of stages that train on packed batches and publish weights.

stage        Stage: one process of the learner, from setup to export
mesh         MeshPlace, Mesh: the position of a rank; join_group: the rendezvous; Agreement: actions of all ranks
coordinator  Coordinator: the only rank connected to the buffer; Channel: broadcasts each batch to the other ranks

batch        StepBatch: the batch of a step, or a part of it, as flat arrays
packing      best-fit packing of whole sequences into micro-batches of one shape, balanced by cost
step         TrainStep: trains on one batch in one or more updates
report       the metrics of a step; BadBatches: batches that training could not use, and detection of divergence

networks     Networks: the policy, and a critic (a second head or a separate model); Reference: the frozen models
device       the device of a rank; MemoryNeed: its peak memory; Offload: host copy of a frozen stage during training
decoders     the supported model families, the cost of their layers, and the split into chunks
model        StageModule: a contiguous range of a Hugging Face decoder's layers
attention    block-diagonal attention over packed sequences
products     bfloat16 embeddings, linear maps and the head; log-probabilities without the full logits
kernels      fused norms, gates, rotary embeddings and softmax, if Triton is available (`row_kernels`)
pipeline     Pipeline: forward-only and training schedules over torch.distributed.pipelining
optimizer    StageOptimizer: AdamW on master weights; an update is applied on all ranks or on none

checkpoint   Checkpoints: atomic checkpoints, written in the background; TrainingState: host copies of the tensors
checkpoint_files  CheckpointMeta, TrainingProgress: the metadata file, with checksums; export_checkpoint
"""

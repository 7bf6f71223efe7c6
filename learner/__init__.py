"""The learner: pipelines of stages that train on packed batches and publish weights.

stage        Stage: one process of the learner, from set-up to export
mesh         MeshPlace, Mesh: a rank's place; join_group: the rendezvous; Agreement: what ranks do as one
coordinator  Coordinator: the one rank that talks to the buffer; Channel: how it hands each batch to the others

batch        StepBatch: a draw, or a part of it, as the flat arrays that a step computes with
packing      best-fit packing of whole sequences into micro-batches of one shape, by cost
step         TrainStep: a step trains one draw in one or several updates
report       the metrics of a step; BadBatches: what could not be trained, and when a run has diverged

networks     Networks: the policy, and a critic that is a head of it or a model of its own; Reference: the frozen models
device       a rank's device, MemoryNeed: what training takes of it; Offload: a frozen stage that is away meanwhile
decoders     the supported families, what their layers cost, and how they are split
model        StageModule: a contiguous share of a Hugging Face decoder's layers
attention    block-diagonal attention over packed sequences
products     of embeddings, linear maps and the head, in bfloat16; log-probabilities without the full logits
kernels      fused norms, gates, rotations and softmax, if Triton is there (`row_kernels`)
pipeline     Pipeline: forward-only and training schedules over torch.distributed.pipelining
optimizer    StageOptimizer: AdamW on master weights; one decision over all ranks

checkpoint   Checkpoints: what a restart needs, in the background and atomically; TrainingState: host copies
checkpoint_files  CheckpointMeta, TrainingProgress: a checkpoint's document, with checksums; export_checkpoint
"""

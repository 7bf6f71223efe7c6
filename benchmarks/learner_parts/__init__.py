"""Parts of benchmarks/learner.py.

processes      runs one measurement in processes of its own, pinned where asked, and ends them all
workload       what is trained: long-tailed sequences as trajectories of the buffer; small models
ours, plain    a training step: the learner's, and a loop over Transformers as most would write it down
measurements   packing, padded, logprob_memory, sleeping, real_compute, smollm2, gpu: one file each
report         bars, and the page docs/results/learner.md
"""

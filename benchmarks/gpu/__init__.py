"""The first half hour on a GPU, and what can be counted without one.

__main__  the steps that are asked for, and the page of what they told
card      checks before anything starts; commit, card and versions of the results
steps     each step in a process of its own with a limit
place     where a step stands: device, models, fresh batches, process group
right     facts, exactness against the CPU, attention, head, groups; life: a whole stage, killed and resumed
fast      steps, sweeps, a profile, copies
mends     what was built for GPUs against what was before it
engine    an engine alone: start, rate, log-probabilities, updates in flight
whole     whole runs: the demo, and a pair with and without asynchrony
gaps      where a step spends what its micro-batches do not
page      docs/results/gpu.md
shapes    models, samples, model FLOPs

pack.sh, prune, wheels.txt, absent   vLLM, Ray and the rest in one set of archives
unpack.sh, site_folder, base.txt     the same on a GPU machine without network

pretended  a GPU that is not there
counting   kernels, bytes and memory of a micro-batch
paper      docs/results/gpu_paper.md
"""

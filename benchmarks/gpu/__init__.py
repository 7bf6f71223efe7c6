"""Measurements on one GPU, and operation counts without one.

__main__  command line: runs the selected steps, and writes the page from their results
card      checks before any step starts; commit, card and versions of the results
steps     runs each step in a process of its own, with a time limit
place     environment of a step: device, models, fresh batches, process group
right     machine facts, comparison of gradients with the CPU, attention, head, process groups
life      a learner stage that is killed and resumed
fast      training steps, variants of the config, a profile, copies
mends     GPU optimizations, each compared with the implementation that it replaced
engine    an engine without a training run: startup, rate, log-probabilities, updates of running requests
whole     complete runs: the demo, and one config with and without asynchrony
gaps      time of a step outside its micro-batches
page      docs/results/gpu.md
shapes    models, samples, model FLOPs

pack.sh, prune, wheels.txt, absent   pack vLLM, Ray and other packages into archives
unpack.sh, site_folder, base.txt     unpack them on a GPU machine without network

pretended  a simulated GPU: CUDA tensors without memory
counting   kernels, bytes and memory of a micro-batch
paper      docs/results/gpu_paper.md
"""

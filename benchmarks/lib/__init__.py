"""Code shared by the benchmarks. Each benchmark is a file of the parent folder; some also have a folder of parts.

machine    description of the machine and the commit of a measurement, and an example model
page       Markdown tables, targets with pass or fail, and the line that states how a page was generated
figure     reproducible SVG files: equal figures give equal bytes
rounds     means, spreads, and ratios over rounds in which the sides take turns
processes  function calls in subprocesses with timeouts; termination of process trees
lengths    synthetic distributions of completion lengths
learner    the training step of the learner, without buffer and actors
runs       one `leeway train` run and the files of its folder
"""

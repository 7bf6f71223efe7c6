"""The parts of benchmarks/off_policy.py: a world small enough to be enumerated, so that pi* is known exactly.

tree      every prefix of every completion, once, and where the tokens of each completion lie among them
policy    TreePolicy: a small transformer that is evaluated on all prefixes at once
world     World: rewards, reference and optimum by enumeration; exact KL and expected reward
rows      the algorithms and corrections that are compared, with their learning rates
training  train: one algorithm at one lag with one seed, through the losses of `algorithms`
workers   the cells of the matrix, shared out to processes
page      the page of results
figure    its plot
"""

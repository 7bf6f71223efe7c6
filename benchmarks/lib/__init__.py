"""What the benchmarks share; each of them is a file of this folder's parent, with a folder of parts where it needs one.

machine    which machine, commit and model the figures are of
page       tables in Markdown, bars and whether they are met, and the line that says how a page was made
figure     an SVG file that is the same bytes for the same figures
rounds     means, spreads, and ratios of rounds in which the sides took turns
processes  functions called in processes of their own, with an end to every wait; and what ends a whole family
lengths    laws of lengths that are made up
learner    the learner's own training step, without buffer and actors
runs       one `leeway train`, and what it left in its folder
"""

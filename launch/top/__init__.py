"""The live view of a run, from its files alone.

sections  Section: what there is to show, in the order of its importance
bars      the distribution of lags as bars
view      View: fits the sections into any width and height
screen    Screen: shows views on a terminal and reads keys
"""

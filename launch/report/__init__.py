"""One page that shows a run: `leeway report`.

Everything is read from the run's folder, live, over or broken; what is missing is said on the page.

data        RunData: all that is known of one run; its curves
timeline    the trace of the run as lanes, read and drawn
samples     the buffer: distributions, and the samples worth looking at
charts      which charts the page has (`svg`: how they are drawn)
page        the page: headline figures, tables, a plan beside what the run did (page.html, page.css, page.js)
"""

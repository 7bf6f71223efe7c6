"""One page that shows a run, and a trace of it: `leeway report` and `leeway trace`.

Everything is read from the run's folder, live, over or broken; what is missing is said on the page.

series      Series: a curve thinned so that spikes stay; metrics.jsonl as curves
spans       timeline.jsonl as lanes: the whole run in bins, and a window of it span by span
samples     the buffer: distributions, and the samples worth looking at
data        RunData: all of it for one run
svg         line charts and bars as inline SVG
lanes       the timeline as inline SVG
figures     which charts the page has
tables      headline figures, pools, ledger, config and its differences
page        the page (page.html, page.css, page.js)
perfetto    the trace
at_end      the page at the end of a run, in a process of its own and in bounded time
"""

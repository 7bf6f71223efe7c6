"""One page that shows a run: `leeway report`.

Everything is read from the run's folder, live, over or broken; the page says what is missing.

data        RunData: all that is known of one run, with its curves and a few samples of its buffer
charts      the charts of charts.toml with the values of the run, as JSON
page        the page: answers, figures and tables (page.html, page.css); page.js draws the charts by uPlot
"""

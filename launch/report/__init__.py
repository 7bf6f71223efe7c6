"""The report of a run as one HTML page: `leeway report`.

The data is read from the run's folder, during or after the run; the page lists missing or damaged parts.

data        RunData: data of one run, with its curves and a few samples of its buffer
charts      the charts of charts.toml with the values of the run, as JSON
page        the page: answers, numbers and tables (page.html, page.css); page.js draws the charts with uPlot
"""

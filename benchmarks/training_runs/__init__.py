"""What benchmarks of whole runs share.

run      one `leeway train` in a process of its own, and what it left in its folder
machine  what the figures were measured on
page     tables in Markdown, and the line that says how a page was made
"""

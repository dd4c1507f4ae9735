"""The report of one or several runs: a page, pictures, and tables of what differs.

reading          everything that a run folder tells, as plain values
findings         times by part, stragglers, memory, bytes sent; long series made short
compare          names of runs, differences of configurations, key figures side by side
style, charts_*  charts, in altair
page, png        one HTML file; one PNG file a chart

Reading and comparing need numpy and pydantic alone; charts need altair, PNG files vl-convert too.
"""

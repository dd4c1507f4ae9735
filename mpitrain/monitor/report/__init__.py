"""Report of one or several runs: an HTML page, pictures, and tables of differences.

reading          contents of a run folder as plain values
findings         times by category, stragglers, memory, bytes sent; thinned series; comparison of several runs
goodput          parts of the wall clock over all starts, and the share that computes steps that last
style, charts    charts in altair
page             one HTML file; one PNG file per chart

Reading and comparing need only numpy and pydantic; charts need altair, PNG files also vl-convert.
"""

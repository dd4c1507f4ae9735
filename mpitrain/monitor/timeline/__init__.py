"""What every rank did in a few steps (`monitor.timeline`): recorded by each, merged with corrected clocks, drawn.

spans.py -> rank-00003.json of every rank -> merging.py
"""

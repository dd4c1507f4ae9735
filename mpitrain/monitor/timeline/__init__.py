"""Timeline of all ranks over a few steps (`monitor.timeline`): recorded by each rank, merged, and drawn.

spans.py -> rank-00003.json of every rank -> merging.py
"""

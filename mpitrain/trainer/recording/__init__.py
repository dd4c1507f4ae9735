"""The callbacks that tell of a run: what it says at its begin and end, its metrics, events, ranks and timelines."""

"""Settings: what a run is configured with, where it is read from, and the configurations of other tools."""

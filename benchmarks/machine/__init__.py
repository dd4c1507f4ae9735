"""The profile of a machine."""

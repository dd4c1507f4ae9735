"""Continuing after the failure of ranks (ULFM)."""

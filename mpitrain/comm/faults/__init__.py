"""Going on without ranks that failed (ULFM)."""

"""One way to fail, and going on without ranks that failed (ULFM)."""

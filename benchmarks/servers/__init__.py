"""Parameter servers, and one slow rank."""

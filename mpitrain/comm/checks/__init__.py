"""What ranks compare before they touch each other's memory, so that unequal arguments are an error."""

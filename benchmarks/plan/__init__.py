"""The planner's predictions beside measured steps."""

"""The time that models take, measured side by side."""

"""Models that run a few nodes at a time, so that every value can be observed."""

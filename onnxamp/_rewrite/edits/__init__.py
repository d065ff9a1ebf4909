"""The edits that carry a decision out: planned as values, and applied in one place."""

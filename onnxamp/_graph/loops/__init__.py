"""States of loops, and integers that count: how far they grow, and whether they fade."""

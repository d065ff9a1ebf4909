"""From a graph and options to a decision: variables, pins and the minimum cut."""

"""Groups of nodes that represent one op, and the search for them."""

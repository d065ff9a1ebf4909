"""Groups of nodes that mean one op, and how they are found."""

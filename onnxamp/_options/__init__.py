"""The user's request: levels, lists and options. The command line, JSON, plans and documentation derive from it."""

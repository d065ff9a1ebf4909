"""The rooms of the package."""

CORE = (
    "_base",
    "_facts",
    "_model",
    "_options",
    "_graph",
    "_decide",
    "_rewrite",
    "_runtime",
    "_gradients",
    "_numerics",
    "_convert",
    "_audit",
    "_tuning",
    "_job",
    "_report",
    "_cli",
)
"""What converts, validates and explains one model, in the way of the data. A room imports from those before it."""

APART = (
    "_text",
    "_fleet",
    "_amp",
    "debugging",
    "train",
    "amp",
    "compat",
    "ir",
    "olive",
)
"""What stands apart: a core room names none of these. Each imports from the core and from those before it."""

ENDS = ("", "__main__")
"""``onnxamp`` itself, which gathers the public names of both groups, and what starts the command line."""

ROOMS = (*CORE, *APART, *ENDS)

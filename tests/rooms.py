"""The rooms of the package."""

CORE = (
    "_public",
    "_errors",
    "_optional",
    "_extensions",
    "_dtypes",
    "_workers",
    "_paths",
    "_state",
    "_ops",
    "_model",
    "_graph",
    "_target",
    "_options",
    "_patterns",
    "_decide",
    "_rewrite",
    "_runtime",
    "_gradients",
    "_convert",
    "_audit",
    "_numerics",
    "_bench",
    "_tuning",
    "_job",
    "_api",
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

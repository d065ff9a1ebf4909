"""Hazards: nodes that are known to break in low precision before anything runs. A module here is one hazard.

It holds a subclass of :class:`onnxamp._decide.kinds.HazardKind` and its only object, ``KIND``: where the hazard is,
what may overrule it, how it is cured, and what audits say of it. No list names these modules.
"""

"""Hazards: nodes that are known to break in low precision before anything runs. A module here is one hazard.

It contains its rule and its ``KIND``: the title, what may overrule it, and its text in audits. No list names them.
"""

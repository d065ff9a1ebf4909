"""Normalizations as graphs of single ops, in text: from ``h`` to ``y``, with ``two``, ``eps`` and ``gain``."""

LAYER_NORM = """m = ReduceMean <axes = [-1]> (h) d = Sub (h, m) p = Pow (d, two) v = ReduceMean <axes = [-1]> (p)
    e = Add (v, eps) q = Sqrt (e) n = Div (d, q) g = Mul (n, gain) y = Add (g, gain)"""
RMS_NORM = """p = Pow (h, two) v = ReduceMean <axes = [-1]> (p) e = Add (v, eps) q = Sqrt (e) n = Div (h, q)
    y = Mul (n, gain)"""

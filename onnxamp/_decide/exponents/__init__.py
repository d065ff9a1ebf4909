"""Exponents: the powers of two by which values are stored so that low precision holds them."""

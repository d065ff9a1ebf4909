"""Pins: variables that are settled before the cut, by facts, by the user and by lists."""

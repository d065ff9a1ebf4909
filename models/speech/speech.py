"""What runs the models of the toy pipeline: letters -> features -> notes and loudness -> sound."""

import numpy as np

TEXTS, LETTERS = 32, 16
FRAMES, SAMPLES = 16, 4
"""Frames of a letter, and samples of a frame."""


def synthesize(models):
    """The sound of some texts, [texts, samples, 1]."""
    ids = np.random.default_rng(0).integers(0, 32, (TEXTS, LETTERS))
    (features,) = models["text_encoder"].run(["features"], {"ids": ids})
    frames = np.repeat(features, FRAMES, axis=1)
    scores, loudness = models["acoustic"].run(["notes", "loudness"], {"features": frames})
    notes, loudness = (np.repeat(x, SAMPLES, axis=1) for x in (scores.argmax(-1), loudness))
    (audio,) = models["vocoder"].run(["audio"], {"notes": notes, "loudness": loudness})
    return {"audio": audio}

"""Draws: series of random samples, and the sizes to try if a model does not run with the usual ones."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from onnxamp._runtime.inputs.random_inputs import InputMaker
from onnxamp._runtime.sessions.values import Feed


class Draw(NamedTuple):
    """Random samples of a seed. Each depends on it and on its own position alone."""

    maker: Callable[[], InputMaker]
    """The facts about the model, which the first sample determines."""
    seed: int
    sizes: Mapping[str, int] = {}
    """Sizes in place of usual ones with which the model does not run: weights determine them, or they were tried."""
    tried: tuple[Mapping[str, int], ...] = ()
    """Sizes with which it does not run."""
    told: str = ""
    """The domain of its numbers, in words; "" for the usual ones."""

    @classmethod
    def by(
        cls, maker: InputMaker, seed: int, sizes: Mapping[str, int], told: str = ""
    ) -> "Draw":
        """Return the draw of a maker that is known already."""
        return cls(maker=lambda: maker, seed=seed, sizes=sizes, told=told)

    def make(self, number: int) -> dict[str, Feed]:
        """Return the sample of a position; raises as :func:`onnxamp._runtime.inputs.random_inputs.random_inputs`."""
        seed = self.seed
        if number:  # the first sample is that of random_inputs for the same seed
            sequence = np.random.SeedSequence((self.seed, number))
            seed = int(sequence.generate_state(1, np.uint64)[0])
        return self.maker().make(seed, number)

    def others(self) -> Iterator["Draw"]:
        """Yield copies with sizes to try if the usual ones do not run, starting with those that the weights
        determine.
        """
        maker = self.maker()
        determined = maker.determined or maker.solved({})
        if maker.determined is None and determined.sizes:
            yield Draw(cache(partial(maker.sized, {})), self.seed, determined.sizes)
        for tried in maker.named.others({*maker.dims, *determined.forced}):
            sizes = {**maker.solved(tried).sizes, **tried}
            yield Draw(cache(partial(maker.sized, tried)), self.seed, sizes)

    def determined(self) -> "Draw":
        """Return the same with the sizes that the weights determine, which the first sample has to find out."""
        return self._replace(maker=cache(lambda: self.maker().sized({})))

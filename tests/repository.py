"""Where the repository is, its models, and inputs for them."""

from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODELS = sorted((ROOT / "models").glob("*.onnx"))


def feeds(name: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    match name:
        case "classifier":
            return [{"image": normal(batch, 3, 32, 32)} for batch in (1, 3)]
        case "encoder":
            ids = rng.integers(0, 128, (2, 12))
            return [{"input_ids": ids, "attention_mask": (np.arange(12) < [[12], [7]]).astype(np.int64)}]
        case "decoder":
            return [
                {
                    "input_ids": rng.integers(0, 128, (2, length)),
                    "position_ids": np.arange(past, past + length)[None].repeat(2, 0),
                    **{f"past_{kind}.{i}": normal(2, 4, past, 16) for kind in ("key", "value") for i in range(2)},
                }
                for length, past in ((6, 0), (1, 3001))
            ]
        case "unet":
            return [{"image": normal(1, 1, *size)} for size in ((32, 48), (41, 32))]
        case "detector":
            return [{"image": rng.integers(0, 256, (2, 3, 128, 128), np.uint8)}]
        case "recurrent":
            inputs = {"features": normal(7, 2, 16), "initial_state": normal(1, 2, 32), "steps": np.array(5)}
            return [{**inputs, "refine": np.array(refine)} for refine in (True, False)]
    raise AssertionError(name)

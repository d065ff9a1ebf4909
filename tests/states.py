"""What state files hold."""

import json
from pathlib import Path


def samples_in(state: Path) -> int:
    """How many samples a state file has kept."""
    keys = (json.loads(line).get("key", "") for line in state.read_text(encoding="utf-8").splitlines())
    return sum(key.partition(" ")[0] == "sample" for key in keys)

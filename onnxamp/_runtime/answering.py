"""The other side of :mod:`onnxamp._runtime.child`: the loop of a process that answers questions.

It imports nothing else, to be there soon.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from onnxamp._workers.signals import HANGUP


def answer_with(answering: Callable[[], Callable[..., dict[str, Any]]]) -> None:
    """Answer one question after the other until there are no more: lines of JSON.

    Args:
        answering: imports the engine, and returns the function that answers a question, given as keywords.
    """
    for number in {signal.SIGINT, HANGUP} - {signal.SIGTERM}:  # the main process decides what ends
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        answer = answering()
        for question in sys.stdin:
            answers.write(json.dumps(answer(**json.loads(question))) + "\n")
            answers.flush()

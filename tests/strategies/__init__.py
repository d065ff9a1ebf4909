"""Random valid ONNX models over the whole op set, for property tests.

``random_model`` draws everything from one ``random.Random``: a seeded one gives the same model every time, and
hypothesis's ``st.randoms()`` shrinks. What schemas do not tell about an op is data: ``ops.toml``.
"""

from .computed import Computed
from .model import Generated, model_of_products, random_model
from .table import NO_RECIPE, all_ops, opsets_of

__all__ = ["NO_RECIPE", "Computed", "Generated", "all_ops", "model_of_products", "opsets_of", "random_model"]

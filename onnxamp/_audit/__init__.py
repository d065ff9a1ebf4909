"""What can be said of a model without running it: types, kernels on the target, fallbacks, Casts, hazards, weights."""

from onnxamp._audit.findings import Audit, Casts, Finding, NodeFacts
from onnxamp._audit.model import audit_model

__all__ = ["Audit", "Casts", "Finding", "NodeFacts", "audit_model"]

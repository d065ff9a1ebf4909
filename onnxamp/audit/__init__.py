"""What can be said of a model without running it: types, kernels on the target, fallbacks, Casts, hazards, weights."""

from onnxamp.audit.findings import Audit, Casts, Finding, NodeFacts
from onnxamp.audit.model import audit_model

__all__ = ["Audit", "Casts", "Finding", "NodeFacts", "audit_model"]

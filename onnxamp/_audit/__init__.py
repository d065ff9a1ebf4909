"""Static checks of a model: types, kernels on the target, fallbacks, Casts, hazards and weights."""

from onnxamp._audit.audit import audit_model
from onnxamp._audit.findings import Audit, Casts, Finding, NodeFacts

__all__ = ["Audit", "Casts", "Finding", "NodeFacts", "audit_model"]

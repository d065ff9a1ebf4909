"""Facts that are known before a model is seen: tables and schemas of ops, types, targets and their kernels."""

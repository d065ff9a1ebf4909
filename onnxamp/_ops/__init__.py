"""Facts about ops, known before any model is seen: tables and schemas."""

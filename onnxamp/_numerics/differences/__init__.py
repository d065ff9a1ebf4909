"""The differences of two results: metrics, and what they are measured on."""

"""Models as files and protos: reading, checking, weights, and writing whole or not at all."""

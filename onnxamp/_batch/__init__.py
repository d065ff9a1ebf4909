"""A whole folder of models, converted in worker processes: what breaks one model breaks no other."""

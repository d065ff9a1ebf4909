"""The conversion that users run, from a model and its samples to a validated result: the only pipeline there is."""

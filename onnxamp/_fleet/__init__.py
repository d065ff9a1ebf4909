"""Fleets: folders of models, workers on a cluster, and files on other machines."""

"""Level auto: as much low precision as the accuracy allows, found in a bounded number of runs."""

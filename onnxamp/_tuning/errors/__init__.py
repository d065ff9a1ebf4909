"""What low precision costs: the error of each rounding, and of a choice of low nodes."""

"""What no sample shows: other branches, sizes and trips, and inputs that are made to be hard."""

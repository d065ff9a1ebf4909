"""Workers: isolated processes of this machine or of a cluster."""

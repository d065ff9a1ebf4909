"""Where work is done: worker processes of this machine or of a cluster, none of which can break another."""

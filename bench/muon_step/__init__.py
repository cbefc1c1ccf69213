"""`python -m bench muon-step`: Muon on the two-tier testbed, against the systems that have it."""

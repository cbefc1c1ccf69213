"""Layout-driven distributed Muon: every matrix orthogonalized once, with the fewest bytes that its sharding allows."""

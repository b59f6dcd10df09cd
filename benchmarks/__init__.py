"""Benchmarks: each verifies what it times and measures its ceiling and its peers in the same run. Results: results/."""

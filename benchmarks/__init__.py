"""Benchmarks: each verifies what it times, measures its ceiling and its peers in the same run, and appends to results/."""

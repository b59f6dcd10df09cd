"""One literal spec per op: the only place an op is described."""

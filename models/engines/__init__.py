"""Engines: a running target and draft. Each generates, swaps its draft, proves what it loaded, and can stop speculating."""

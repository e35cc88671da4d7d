"""HTTP around one engine, and the loop that keeps its draft in step with the registry."""

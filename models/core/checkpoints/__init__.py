"""Model directories: read, written, compressed, and what each stage promises of their weights."""

"""What runs, in which order. A flow is a page: one recipe in, task calls, branches only on what a task returned."""

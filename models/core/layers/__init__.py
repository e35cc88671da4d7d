"""Parts that several methods share. Not a family: nothing here is chosen by name."""

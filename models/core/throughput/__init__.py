"""What steps take and how much is accepted just now, from which the length policies plan."""

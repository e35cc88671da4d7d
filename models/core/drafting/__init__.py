"""What families of drafts share: shapes of heads, their directories, look-up, and what a draft proposes."""
